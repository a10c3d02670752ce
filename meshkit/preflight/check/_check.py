"""One step on a small mesh and on one device, compared."""

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
from meshkit.preflight.check._collective_order import CollectiveOrder, Outcome, OutOfOrder, Stopped
from meshkit.preflight.check._compare import compare
from meshkit.preflight.check._finding import Finding, Report
from meshkit.preflight.check._ranks import on_ranks
from meshkit.preflight.check._record import (
    Facts,
    Recorder,
    parts_of,
    strangers_of,
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
    mesh: Mesh | MeshSpec | str,
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
    mesh: without a process group, so many ranks are forked from this process and run on CPU; in a world, its ranks run the
    check together, and the mesh is all of it.
    batch: the rows of the whole step; give different rows, uneven counts, fewer rows than ranks. Floats become of the model's
    dtype.
    step(run, rows) -> loss: forward and backward of this rank's rows; default `run.forward_backward`. optimizer(run): default
    `adamw`. reference(): the plain model, where `model(mesh)` cannot be built for one rank.
    sharded: parameter pattern -> (axis, dim), for parameters of yours that are parts and plain tensors.
    dtype: the default dtype while models are built; of differences in fp64 none is rounding. `Precision` of `memory` is left
    out. Dropout modules are switched off.
    timeout_s: how long a rank may wait for another's collective.
    Wire: what the step sends; beside it a store tells ranks what the others are about to call.
    Raises: what the model raises, PlanError for what cannot be compared.
    """
    chosen = Strategy.of(strategy, choices)
    job = Request(
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
        replace(chosen, memory=replace(chosen.memory, precision=None), compile=False),
    )
    job.refuse()
    if dist.is_initialized():
        return _on_rank(job, mesh if isinstance(mesh, Mesh) else init_mesh(mesh))
    if isinstance(mesh, Mesh):
        raise MeshError("check: this mesh is of a world that is gone. Give its sizes, as dp_shard=2 tp=2.")
    spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
    spec = spec.resolve(spec.world_size)
    report: Report = on_ranks(
        spec.world_size, lambda: _on_rank(job, init_mesh(spec, device_type="cpu")), timeout_s=10 * timeout_s
    )
    return report


def _on_rank(job: Request, mesh: Mesh) -> Report:
    if len(mesh.ranks) != dist.get_world_size():
        raise MeshError(
            f"check: the mesh is on {len(mesh.ranks)} of {dist.get_world_size()} ranks. Give a mesh of all of them."
        )
    one_rank = init_mesh(MeshSpec(), ranks=[mesh.ranks[0]], device_type=mesh.device_type)
    with default_dtype(job.dtype):
        if job.builds_all:
            made = job.built(job.model, mesh)
        else:
            plain = job.plain()
            different = different_first_values(plain, mesh)
            if different is not None:
                return Report(
                    spec=mesh.spec, findings=(different,), parameters=len(list(plain.parameters())), collectives=0
                )
            empty = any(param.is_meta for param in plain.parameters())
            made = parallelize(plain, mesh, job.strategy)
            if empty:
                init_weights(made.model, seed=0, plan=made.plan)
    model = model_of(made)
    if not isinstance(made, Run) and job.given_step is None:
        raise PlanError("check: the function returns a module, not a Run. Say how a step is made of it by step=.")
    _without_dropout(model)
    facts, stop = _step(job, mesh, made)
    if stop is not None:
        return stop
    everyone: list[Facts | None] | None = [None] * len(mesh.ranks) if mesh.rank == 0 else None
    dist.gather_object(facts, everyone, dst=mesh.ranks[0], group=mesh.group)
    answer: list[Report | Exception | None] = [None]
    if everyone is not None:
        try:
            answer = [_compare(job, mesh, one_rank, [each for each in everyone if each is not None], _dtype(made))]
        except Exception as error:  # the others wait for it
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


def _step(job: Request, mesh: Mesh, made: Run | nn.Module) -> tuple[Facts | None, Report | None]:
    """What the step did on this rank, or why it did not end."""
    model = model_of(made)
    optimizer = job.optimizer(made)
    parts = parts_of(model, mesh, job.sharded)
    own = job.rows_of(mesh.data_rank, mesh.data_ranks)
    first = own.start + len(torch.arange(own.stop - own.start).tensor_split(job.microbatches)[0])
    batch = cast(job.batch, model)
    recorder = Recorder(model)
    watch = CollectiveOrder(mesh, recorder.place, job.timeout_s)
    outcome: Outcome = None
    raised: Exception | None = None
    loss: Any = None
    try:
        with torch.compiler.set_stance("force_eager"), watch:  # modules inside of compiled blocks would not be seen
            loss = job.step(made, {name: tensor[own].to(mesh.device) for name, tensor in batch.items()})
            parts = with_gradients(parts, model, optimizer)
            optimizer.step()
    except OutOfOrder as error:
        outcome = error.finding
    except Stopped:
        outcome = ""
    except Exception as error:
        outcome, raised = f"{type(error).__name__}: {error}", error
    recorder.remove()
    ends, calls = watch.finish(outcome)
    findings = [found for _, found in sorted(ends.items()) if isinstance(found, Finding)]
    if findings:
        report = Report(spec=mesh.spec, findings=(findings[0],), parameters=len(parts), collectives=calls)
        return None, report
    if raised is not None:
        raise raised
    for rank, text in sorted(ends.items()):
        if text:
            raise CheckError(f"check: rank {rank} raised {text}")
    facts = Facts(
        place={axis: mesh.dense.get_local_rank(axis) for axis in DENSE_AXES},
        parts=with_values_after(parts, model),
        tied=tied_names(model),
        outputs=recorder.outputs,
        gradients=recorder.gradients,
        rows=(own.start, first),
        loss=as_number(loss),
        calls=tuple(watch.calls),
        strangers=strangers_of(model, optimizer),
    )
    return facts, None


def _compare(job: Request, mesh: Mesh, one_rank: Mesh, facts: list[Facts], compute: torch.dtype) -> Report:
    made = job.on_one(one_rank)
    _without_dropout(model_of(made))
    rows = [job.rows_of(rank, mesh.data_ranks) for rank in range(mesh.data_ranks)]
    one = OneDevice(
        made,
        job.step_of_one,
        cast(job.batch, model_of(made)),
        rows,
        parts=None if job.given_step is not None else (job.loss, job.count),
    )
    findings, gradient_error, loss_error = compare(facts, one, mesh.spec, compute)
    return Report(
        spec=mesh.spec,
        findings=tuple(findings),
        parameters=len(one.shapes),
        collectives=len(facts[0].calls),
        gradient_error=gradient_error,
        loss_error=loss_error,
    )


def _dtype(made: Run | nn.Module) -> torch.dtype:
    """Of matrix products."""
    precision = made.resolved.memory.precision if isinstance(made, Run) else None
    return precision.compute if precision is not None else next(model_of(made).parameters()).dtype


def _without_dropout(model: nn.Module) -> None:
    """Dropout draws other numbers on a mesh."""
    for module in model.modules():
        if isinstance(
            module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
        ):
            module.p = 0.0
