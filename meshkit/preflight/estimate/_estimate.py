"""Memory estimation: run a step of the real model in a fake world on fake tensors, and count its bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshkit._parallelize import parallelize
from meshkit.checkpoint import InMemory
from meshkit.core import _torch
from meshkit.core.arguments import require
from meshkit.core.host_accounting import estimating
from meshkit.errors import PlanError
from meshkit.memory import refuse_fp8_hardware
from meshkit.mesh import Mesh, MeshSpec, init_mesh, replica_mesh
from meshkit.mesh.world import fake_world
from meshkit.optim import adamw
from meshkit.optim.outer import OuterOptimizer, Policy
from meshkit.preflight._arguments import full_coordinate, rank_at, refuse_sizes, spec_of
from meshkit.preflight.estimate._allocator import reserved_bytes
from meshkit.preflight.estimate._kernels import cuda_kernels
from meshkit.preflight.estimate._microbatches import least_microbatches, rows_of
from meshkit.preflight.estimate._result import Estimate
from meshkit.preflight.estimate._shapes import Shapes
from meshkit.preflight.estimate._tracker import CLIP, FORWARD_BACKWARD, GROUPS, OPTIMIZER, Tracker
from meshkit.program import without_values
from meshkit.step import Loss, Run, clip_grad_norm, next_token_loss
from meshkit.strategy import Strategy

Build = Callable[[Mesh], Run]
MakeOptimizer = Callable[[Run], torch.optim.Optimizer]
Kernels = Literal["cuda", "cpu"]

CUDA_GRANULE = 512  # bytes; CUDACachingAllocator rounds every size up to a multiple of it


def estimate(
    model: nn.Module | Build,
    spec: MeshSpec | str | None = None,
    strategy: Strategy | None = None,
    *,
    rows: int,
    seq_len: int,
    microbatches: int | None = None,
    world_size: int | None = None,
    coordinate: dict[str, int] | None = None,
    kernels: Kernels = "cuda",
    optimizer: MakeOptimizer | None = None,
    loss: Loss = next_token_loss,
    in_memory: InMemory | None = None,
    outer: Policy | None = None,
    every_microbatch: bool = False,
    **choices: Any,
) -> Estimate:
    """Estimate the memory of one rank in an optimizer step, before anything runs: bytes by kind, the peak and where it is.

    model: what `parallelize` gets, on meta; or a function (mesh) -> Run that calls `parallelize` itself, and then neither a
    strategy nor choices. spec: default, the strategy's mesh. strategy, or its choices by keyword: as `parallelize` takes
    them. The model is built, parallelized and stepped for real in `fake_world` on tensors without memory: no GPU, seconds,
    about 1 GiB for Llama-3-8B on any number of ranks.
    rows, seq_len: this rank's [rows, seq_len] part of the step's batch; microbatches: gradient accumulation, how many parts
    it is run in; default: the strategy's, or 1. Of many, the least number is run that has the same peak (with pp as many
    as give ranks the same fullest instants); every_microbatch runs all.
    world_size: default what `spec` needs. coordinate: the rank's index on each dense axis, default 0; stages differ.
    outer: a policy of local updates: the run is on a replica of the mesh, and the outer state, with a delay what travels
    too, is counted as optimizer state. Not what a meeting needs while it lasts, when there are no activations.
    in_memory: what a Checkpointer keeps in the memory of the hosts, with copies for others.
    optimizer: (run) -> optimizer, default `adamw`. loss: as in `Run.forward_backward`, of input_ids and labels.
    kernels: "cuda" counts RMSNorm and plain attention in bf16 as CUDA's kernels keep them, sizes rounded as its allocator
    does; "cpu" counts what a run on CPU holds. Not counted: workspaces of kernels (cuBLAS), buffers of NCCL, fragmentation.
    Compiled blocks are counted as in eager mode: their partitioner keeps no more than autograd does, so this is from above.
    Tokens choose all experts equally often.
    Raises: MeshError and PlanError as the real run would, and PlanError for a model whose step depends on its values.
    """
    build = builder_of(model, strategy, choices, verb="estimate")
    chosen = Strategy.of(strategy, choices)
    if kernels not in ("cuda", "cpu"):
        raise PlanError(f"estimate: kernels={kernels!r} are not known. Choose cuda or cpu.")
    precision = chosen.memory.precision
    if kernels == "cpu" and precision is not None and precision.fp8 is not None:
        refuse_fp8_hardware(precision.fp8, "cpu")
    sizes = spec_of(spec, chosen, world_size)
    place = full_coordinate(sizes, coordinate)
    refuse_sizes(rows, seq_len, microbatches)
    began = time.monotonic()
    with fake_mesh(sizes, place, kernels=kernels) as mesh:
        run = build(mesh if outer is None else replica_mesh(mesh))
        run.resolved.refuse_tokens(seq_len)
        count = microbatches or run.strategy.microbatches or 1
        traced = count if every_microbatch else least_microbatches(run.resolved, count)
        sizes_of_rank = rows_of(rows, count, traced), seq_len
        batch = {name: torch.zeros(sizes_of_rank, dtype=torch.int64) for name in ("input_ids", "labels")}
        tracker = tracker_of(run, granule=CUDA_GRANULE if kernels == "cuda" else 1)
        with tracker:
            count_parameters(tracker, run.model)
            built_optimizer = (optimizer or adamw_of)(run)
            if outer is not None:
                replicas = OuterOptimizer(run, built_optimizer, mesh, outer)
                in_flight = torch.empty(replicas.period.flight_bytes, dtype=torch.uint8, device=mesh.device)
                tracker.count_as([*replicas.tensors, in_flight], "optimizer state")
            for _ in range(2):  # the first step makes the optimizer state; the second is measured
                tracker.forget_points()
                tracked_step(tracker, run, built_optimizer, batch, traced, loss)
        estimated = result(tracker, run, place, kernels=kernels, took_s=time.monotonic() - began)
        kept_bytes = 0 if in_memory is None else in_memory.bytes_of(run, built_optimizer)
        return replace(
            estimated,
            in_memory_bytes=kept_bytes,
            offloaded_bytes=0 if run.offload is None else run.offload.last_step.peak_bytes,
            microbatches=count,
            traced=traced,
        )


def builder_of(model: nn.Module | Build, strategy: Strategy | None, choices: dict[str, Any], *, verb: str) -> Build:
    """(mesh) -> Run for a module or a function. verb: for errors. Raises: PlanError for choices beside a function."""
    if not callable(model):
        require("parallelize", "model", model, nn.Module)
    if not isinstance(model, nn.Module):
        given_choices = (["strategy"] if strategy is not None else []) + list(choices)
        if given_choices:
            raise PlanError(
                f"{verb}: a function that builds the run makes its own choices, but got {', '.join(given_choices)} as well."
            )
        return model
    chosen = Strategy.of(strategy, choices)

    def build(mesh: Mesh) -> Run:
        return parallelize(_own_copy(model), mesh, chosen)

    return build


def _own_copy(model: nn.Module) -> nn.Module:
    """What parallelize may change in place: parameters on meta, and buffers, whose values a forward may read, as they are."""
    twin = without_values(model)
    cloned = {id(buffer): buffer.clone() for buffer in twin.buffers()}
    for module in twin.modules():
        module._buffers.update(
            {name: cloned[id(buffer)] for name, buffer in module._buffers.items() if buffer is not None}
        )
    return twin


@contextmanager
def fake_mesh(spec: MeshSpec, coordinate: dict[str, int], *, kernels: Kernels) -> Iterator[Mesh]:
    """A mesh in a fake world that sends nothing, as one rank sees it. What is built on it has shapes and no values."""
    with fake_world(spec.world_size, rank_at(spec, coordinate)), ExitStack() as stack:
        mesh = init_mesh(spec, device_type="cpu")
        # Dispatch modes and module hooks do not reach into compiled blocks.
        torch.compiler.set_stance("force_eager")
        stack.callback(torch.compiler.set_stance, "default")
        stack.enter_context(_torch.hiding_shape_propagation())
        stack.enter_context(estimating(late=kernels == "cuda"))
        stack.enter_context(Shapes())
        # With cp attention is an operator of meshkit's, which calls kernels and nothing of torch.nn.functional.
        if kernels == "cuda":
            stack.enter_context(cuda_kernels(attention=spec.cp == 1))
        yield mesh


def adamw_of(run: Run) -> torch.optim.Optimizer:
    return adamw(run, lr=1e-3)


def tracker_of(run: Run, *, granule: int = 1) -> Tracker:
    """A tracker of the run's steps, real ones or fake ones."""
    units = run.resolved.units_of(run.mesh["pp"].get_local_rank())
    return Tracker(
        run.model,
        [*run.blocks, *units],
        head=units[-1] if units else "",
        device=run.mesh.device,
        granule=granule,
    )


def count_parameters(tracker: Tracker, model: nn.Module) -> None:
    tracker.count_as([*model.parameters(), *model.buffers()], "parameters")


def tracked_step(
    tracker: Tracker,
    run: Run,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    microbatches: int | None,
    loss: Loss = next_token_loss,
) -> None:
    """One optimizer step; tells the tracker which phase of it runs."""
    tracker.start(FORWARD_BACKWARD)
    run.forward_backward(batch, microbatches=microbatches, loss=loss, step=0)
    tracker.start(CLIP)
    clip_grad_norm(run, 1.0)
    tracker.start(OPTIMIZER)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    tracker.count_as(states, "optimizer state")
    tracker.start("after the step")
    optimizer.zero_grad()


def result(tracker: Tracker, run: Run, coordinate: dict[str, int], *, kernels: str, took_s: float = 0.0) -> Estimate:
    """The estimate of what the tracker has counted since `forget_points`."""
    peak = max(tracker.points, key=lambda point: point.device_bytes)
    most = {group: max(point.totals[index] for point in tracker.points) for index, group in enumerate(GROUPS)}
    return Estimate(
        spec=run.mesh.spec,
        coordinate=coordinate,
        kernels=kernels,
        most=most,
        activations=dict(tracker.kept),
        after_forward=dict(zip(GROUPS, tracker.after_forward, strict=True)),
        peak=peak,
        points=tuple(tracker.points),
        took_s=took_s,
        reserved_bytes=reserved_bytes(tracker.changes) if kernels == "cuda" else None,
    )


# Measured memory of a real run, to compare with the estimate.


def measure(run: Run, optimizer: torch.optim.Optimizer, *, rows: int, seq_len: int, microbatches: int = 1) -> int:
    """Peak bytes of the run's second optimizer step: CUDA's own count, and on a CPU that of `Tracker` on real tensors.

    rows, seq_len: as `estimate` takes them. The tokens are zeros; the parameters change.
    """
    batch = {name: torch.zeros(rows, seq_len, dtype=torch.int64) for name in ("input_ids", "labels")}
    device = run.mesh.device
    tracker = tracker_of(run)
    if device.type == "cuda":
        # max_memory_allocated counts what tensors occupy, in blocks of CUDA_GRANULE, and no cached, free blocks.
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats(device)
            tracked_step(tracker, run, optimizer, batch, microbatches)
        return torch.cuda.max_memory_allocated(device)
    with tracker:
        count_parameters(tracker, run.model)
        for _ in range(2):
            tracker.forget_points()
            tracked_step(tracker, run, optimizer, batch, microbatches)
    return result(tracker, run, {}, kernels="cpu").peak_bytes
