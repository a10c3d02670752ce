"""check: one training step on a small mesh and on one device, compared (parity check, debugging of wrong gradients)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshkit._parallelize import parallelize
from meshkit.errors import CheckError, MeshError, PlanError
from meshkit.initialize import init_weights
from meshkit.mesh import DENSE_AXES, Mesh, MeshSpec, init_mesh
from meshkit.preflight._arguments import spec_of
from meshkit.preflight.check._collective_order import CollectiveOrder, Outcome, OutOfOrder, Stopped
from meshkit.preflight.check._compare import compare
from meshkit.preflight.check._finding import Finding, Report
from meshkit.preflight.check._ranks import on_ranks
from meshkit.preflight.check._record import (
    Facts,
    Recorder,
    foreign_tensors_of,
    local_shards,
    tied_names,
    with_gradients,
    with_values_after,
)
from meshkit.preflight.check._reference import OneDevice, Step, as_number, model_of
from meshkit.preflight.check._request import Request, cast, default_dtype
from meshkit.preflight.check._state_checks import different_first_values
from meshkit.step import Batch, Count, Loss, Run, count_labels, next_token_loss
from meshkit.strategy import Strategy

Build = Callable[[Mesh], Run | nn.Module]


def check(
    model: nn.Module | Callable[[], nn.Module] | Build,
    mesh: Mesh | MeshSpec | str | None = None,
    strategy: Strategy | None = None,
    *,
    batch: Batch,
    microbatches: int | None = None,
    loss: Loss = next_token_loss,
    count: Count = count_labels,
    step: Step | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    reference: Callable[[], nn.Module] | None = None,
    sharded: Mapping[str, tuple[str, int]] | None = None,
    dtype: torch.dtype = torch.float64,
    timeout_s: float = 60.0,
    **choices: Any,
) -> Report:
    """Run one optimizer step on the mesh and on one device, and say what differs, where, and what the mistake likely is.

    model: a module, real or on meta, or a function () that builds one: they are put on the mesh by `parallelize` with the
    strategy, or with choices by keyword. Or a function (mesh) that does it all, with communication of its own too: it is
    called once with the mesh and once with a mesh of one rank, and returns a Run, or a module together with `step`.
    mesh: default, the strategy's. Without a process group, its ranks are forked from this process and run on CPU; in a
    world, its ranks run the check together, and the mesh is all of it.
    batch: the rows of the whole step; give different rows, uneven counts, fewer rows than ranks. Floats become of the model's
    dtype.
    step(run, rows) -> loss: forward and backward of this rank's rows; default `run.forward_backward`. optimizer(run): default
    `adamw`. reference(): the plain model, where `model(mesh)` cannot be built for one rank.
    sharded: parameter pattern -> (axis, dim), for your own parameters that are shards in plain tensors.
    dtype: the default dtype while models are built; in fp64 no difference is rounding. `Precision` of `memory` is left out.
    Dropout modules are switched off.
    timeout_s: how long a rank may wait for another's collective.
    Wire: what the step sends; beside it a store tells ranks what the others are about to call.
    Raises: what the model raises, PlanError for what cannot be compared.
    """
    chosen = Strategy.of(strategy, choices)
    request = Request(
        model,
        batch,
        (chosen.microbatches or 1) if microbatches is None else microbatches,
        loss,
        count,
        step,
        optimizer,
        reference,
        sharded or {},
        dtype,
        timeout_s,
        # No mixed precision, whose rounding would hide small mistakes, and no compiled graphs, which hide modules.
        replace(chosen, memory=replace(chosen.memory, precision=None), compile=False),
    )
    request.refuse()
    wanted = chosen.mesh if mesh is None else mesh
    if wanted is None:
        raise MeshError("check: there is no mesh to check on. Give mesh='dp_shard=2 tp=2', or a strategy that has one.")
    if dist.is_initialized():
        return _on_rank(request, wanted if isinstance(wanted, Mesh) else init_mesh(wanted))
    if isinstance(wanted, Mesh):
        raise MeshError("check: this mesh is of a world that is gone. Give its sizes, as dp_shard=2 tp=2.")
    spec = spec_of(wanted, chosen)
    report: Report = on_ranks(
        spec.world_size, lambda: _on_rank(request, init_mesh(spec, device_type="cpu")), timeout_s=10 * timeout_s
    )
    return report


def _on_rank(request: Request, mesh: Mesh) -> Report:
    if len(mesh.ranks) != dist.get_world_size():
        raise MeshError(
            f"check: the mesh is on {len(mesh.ranks)} of {dist.get_world_size()} ranks. Give a mesh of all of them."
        )
    # Made by all ranks, though only the first uses it: new groups are a collective of the world.
    one_rank = init_mesh(MeshSpec(), ranks=[mesh.ranks[0]], device_type=mesh.device_type)
    with default_dtype(request.dtype):
        if request.builds_all:
            built = request.built(request.model, mesh)
        else:
            plain = request.plain()
            different = different_first_values(plain, mesh)
            if different is not None:
                return Report(
                    spec=mesh.spec, findings=(different,), parameters=len(list(plain.parameters())), collectives=0
                )
            empty = any(param.is_meta for param in plain.parameters())
            _without_dropout(plain)
            built = parallelize(plain, mesh, request.strategy)
            if empty:
                init_weights(built.model, seed=0, plan=built.plan)
    model = model_of(built)
    if not isinstance(built, Run) and request.given_step is None:
        raise PlanError("check: the function returns a module, not a Run. Say how a step is made of it by step=.")
    if isinstance(built, Run) and built.pipeline is not None and request.given_step is None:
        table = built.pipeline.schedule(request.microbatches)
        if table.skips:
            raise PlanError(
                f"check: microbatches of the schedule {table.name!r} skip stages, and one device runs all blocks, so that "
                "the two differ as they should. Check with a schedule that passes all stages."
            )
    _without_dropout(model)
    facts, stop = _step(request, mesh, built)
    if stop is not None:
        return stop
    all_facts: list[Facts | None] | None = [None] * len(mesh.ranks) if mesh.rank == 0 else None
    dist.gather_object(facts, all_facts, dst=mesh.ranks[0], group=mesh.group)
    answer: list[Report | Exception | None] = [None]
    if all_facts is not None:
        try:
            gathered = [entry for entry in all_facts if entry is not None]
            answer = [_compare(request, mesh, one_rank, gathered, _dtype(built))]
        except Exception as error:  # the other ranks wait in the broadcast below, so they are told before it is raised
            answer = [error]
            dist.broadcast_object_list(
                [CheckError(f"check: rank 0 raised {error}")], src=mesh.ranks[0], group=mesh.group
            )
            raise
    dist.broadcast_object_list(answer, src=mesh.ranks[0], group=mesh.group)
    if isinstance(answer[0], Exception):
        raise answer[0]
    assert answer[0] is not None
    return answer[0]


def _step(request: Request, mesh: Mesh, built: Run | nn.Module) -> tuple[Facts | None, Report | None]:
    """(facts of the step on this rank, None), or (None, a report) if it did not end."""
    model = model_of(built)
    optimizer = request.optimizer(built)
    shards = local_shards(model, mesh, request.sharded)
    rows = request.rows_of(mesh.data_rank, mesh.data_ranks)
    first_end = rows.start + len(torch.arange(rows.stop - rows.start).tensor_split(request.microbatches)[0])
    batch = cast(request.batch, model)
    recorder = Recorder(model)
    order = CollectiveOrder(mesh, recorder.current_module, request.timeout_s)
    if isinstance(built, Run) and built.units is not None:
        built.units.look = order.look
    outcome: Outcome = None
    raised: Exception | None = None
    loss: Any = None
    try:
        # Inside of `order` every collective is announced in the store before it is called; see _collective_order.py.
        with torch.compiler.set_stance("force_eager"), order:  # modules inside of compiled blocks would not be seen
            loss = request.step(built, {name: tensor[rows].to(mesh.device) for name, tensor in batch.items()})
            shards = with_gradients(shards, model, optimizer)
            optimizer.step()
    except OutOfOrder as error:
        outcome = error.finding
    except Stopped:
        outcome = ""
    except Exception as error:
        outcome, raised = f"{type(error).__name__}: {error}", error
    recorder.remove()
    ends, calls = order.finish(outcome)
    findings = [end for _, end in sorted(ends.items()) if isinstance(end, Finding)]
    if findings:
        report = Report(spec=mesh.spec, findings=(findings[0],), parameters=len(shards), collectives=calls)
        return None, report
    if raised is not None:
        raise raised
    for rank, text in sorted(ends.items()):
        if text:
            raise CheckError(f"check: rank {rank} raised {text}")
    facts = Facts(
        coordinate={axis: mesh.dense.get_local_rank(axis) for axis in DENSE_AXES},
        shards=with_values_after(shards, model),
        tied=tied_names(model),
        outputs=recorder.outputs,
        gradients=recorder.gradients,
        rows=(rows.start, first_end),
        loss=as_number(loss),
        calls=tuple(order.calls),
        foreign_tensors=foreign_tensors_of(model, optimizer),
    )
    return facts, None


def _compare(request: Request, mesh: Mesh, one_rank: Mesh, facts: list[Facts], compute: torch.dtype) -> Report:
    built = request.on_one_device(one_rank)
    _without_dropout(model_of(built))
    rows = [request.rows_of(rank, mesh.data_ranks) for rank in range(mesh.data_ranks)]
    reference = OneDevice(
        built,
        request.reference_step,
        cast(request.batch, model_of(built)),
        rows,
        loss_and_count=None if request.given_step is not None else (request.loss, request.count),
    )
    findings, gradient_error, loss_error = compare(facts, reference, mesh.spec, compute)
    return Report(
        spec=mesh.spec,
        findings=tuple(findings),
        parameters=len(reference.shapes),
        collectives=len(facts[0].calls),
        gradient_error=gradient_error,
        loss_error=loss_error,
    )


def _dtype(built: Run | nn.Module) -> torch.dtype:
    """The dtype of matrix products."""
    precision = built.resolved.memory.precision if isinstance(built, Run) else None
    return precision.compute if precision is not None else next(model_of(built).parameters()).dtype


def _without_dropout(model: nn.Module) -> None:
    """Switch dropout off: it draws other numbers on a mesh."""
    for module in model.modules():
        if isinstance(
            module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
        ):
            module.p = 0.0
