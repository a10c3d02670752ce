"""`move`: a run that goes on under another strategy, on the same ranks. This file is the order of what happens.

All that may refuse comes first, on tensors without memory: a refusal leaves the run as it was. Then values move, some tensors
at a time, and the memory of the old ones is freed behind them. Last, the run and the optimizer become the new ones.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from meshkit.core.gradient import gradient_of
from meshkit.core.materialize import without_memory
from meshkit.core.model_state import model_tensors
from meshkit.core.optimizer_state import finish_update
from meshkit.core.optimizer_step import replaced
from meshkit.core.reshard import ReallocationPlan
from meshkit.errors import PlanError, StepError
from meshkit.mesh import MeshSpec, change_axes
from meshkit.moving._agree import gathered
from meshkit.moving._changed import later_changes, refuse_parted_buffers
from meshkit.moving._experts import bring_home
from meshkit.moving._model import like_running
from meshkit.moving._optimizer import Moving, refuse_optimizer
from meshkit.moving._tensors import move_model
from meshkit.parallel.wires import rounding_errors
from meshkit.step import Movable, Run, compare_anew
from meshkit.strategy import Strategy


def move(
    parallelize: Callable[..., Run],
    run: Run,
    strategy: Strategy,
    *,
    optimizer: Optimizer | None,
    loader: Movable | None,
) -> ReallocationPlan:
    """See `Run.move`. parallelize: the verb, which is above this room."""
    mesh = run.mesh
    _refuse_together(run, strategy, optimizer, loader)
    bring_home(run, optimizer)
    with _same_random_numbers(mesh.device):
        # Everything that may refuse.
        assert isinstance(strategy.mesh, MeshSpec)
        changed = change_axes(mesh, strategy.mesh)
        chosen = dataclasses.replace(strategy, mesh=changed.spec)
        model = like_running(run)
        refuse_parted_buffers(run, model)
        with without_memory():
            new = parallelize(model, changed, chosen, example=run.resolved.program.example)
        _refuse_other_tensors(run, new)
        if optimizer is not None:
            finish_update(optimizer)
        moving = None if optimizer is None else Moving(optimizer, run, new)
        # From here on the old run goes.
        old = run.model
        try:
            plan = move_model(run, new)
            if moving is not None:
                plan = _joined(plan, moving.move())
        except BaseException:
            for module in old.modules():  # a stage is called without what is around it
                module.register_forward_pre_hook(_lost, prepend=True)
            raise
    if moving is not None:
        moving.commit()
        compare_anew(moving.optimizer)
    replaced(dict(run.named_parameters()))
    vars(run).clear()
    vars(run).update(vars(new))
    old.register_forward_pre_hook(_moved, prepend=True)
    if loader is not None:
        loader.move(changed)
    # The old model is a circle of modules and hooks, and recipes collect garbage in some steps only.
    del old, model, moving, new
    gc.collect()
    return plan


# ------------------------------------------------------------------------------------------------------ refusals


def _refuse_together(run: Run, strategy: Strategy, optimizer: Optimizer | None, loader: Movable | None) -> None:
    """Raises: PlanError on every rank for a run that cannot be moved now; AgreementError where ranks differ.

    Wire: an all-reduce in which ranks agree on the call, and an all-gather of what they refuse, as objects.
    """
    why = _refusal(run, optimizer, loader)
    facts = {
        "mesh": strategy.mesh,
        "zero": strategy.zero,
        "data": strategy.data,
        "sequence": strategy.sequence,
        "schedule": strategy.pipeline.schedule if isinstance(strategy.pipeline.schedule, str) else "a function",
        "microbatches": strategy.microbatches,
        "optimizer": type(optimizer).__name__,
        "loader": type(loader).__name__,
    }
    run.mesh.agreement.meet("move", facts=facts)
    gathered(run.mesh, lambda: _raise(why) if why else None)


def _raise(why: str) -> NoReturn:
    raise PlanError(why)


def _refusal(run: Run, optimizer: Optimizer | None, loader: Movable | None) -> str:
    """Why the run cannot be moved now; empty where it can."""
    if run.watcher is not None:
        return "a CorruptionGuard looks at this run's tensors. Close it, and make another one after the move."
    if run.later is not None and (changed := run.later.refusal(None)):
        return changed
    if changed := later_changes(run):
        return changed
    if rounding_errors(run.model):
        return (
            "gradients are reduced with error feedback, and what rounding took of them does not move. Save, and resume under "
            "the other strategy."
        )
    if with_gradients := [name for name, param in run.named_parameters() if gradient_of(param) is not None]:
        return (
            f"{len(with_gradients)} parameters have gradients, {with_gradients[0]!r} first, which do not move. Call "
            "optimizer.step() and optimizer.zero_grad() before it."
        )
    if loader is not None and not callable(getattr(loader, "move", None)):
        return (
            f"a {type(loader).__name__} has no move(mesh), by which it would be told its part of the batch. Leave loader= "
            "out, and give it run.mesh.data_rank and run.mesh.data_ranks after the move."
        )
    return "" if optimizer is None else refuse_optimizer(optimizer)


def _refuse_other_tensors(run: Run, new: Run) -> None:
    """Wire: an all-gather of names over the mesh, as objects. Raises: PlanError, on every rank, for a model whose tensors are
    others than those that `parallelize` got, as after a merge of adapters."""
    told = gathered(run.mesh, lambda: (set(model_tensors(run.model)), set(model_tensors(new.model))))
    now, then = (set().union(*(each[side] for each in told)) for side in (0, 1))
    if other := sorted(now ^ then):
        raise PlanError(
            f"move: the model has changed since parallelize: {other[0]!r} is in one of the two alone. Export or save it, and "
            "parallelize the changed model."
        )


def _moved(module: nn.Module, args: Any) -> NoReturn:
    raise StepError("this model was moved to another strategy, and has no parameters any more. Use run.model.")


def _lost(module: nn.Module, args: Any) -> NoReturn:
    raise StepError("a move of this run failed when it was under way. Start again from the newest checkpoint.")


# ------------------------------------------------------------------------------------------------------ what stays


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    """Inside, generators may be drawn from: afterwards they stand where they stood."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        yield


def _joined(first: ReallocationPlan, second: ReallocationPlan) -> ReallocationPlan:
    return ReallocationPlan(
        rounds=first.rounds + second.rounds,
        copies=first.copies + second.copies,
        lower_bound_bytes=first.lower_bound_bytes + second.lower_bound_bytes,
        bucket_bytes=first.bucket_bytes,
        ranks_per_node=first.ranks_per_node,
    )
