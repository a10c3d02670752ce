"""The first step of a user's optimizer on a model that was split: refused where it would change nothing, or cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from meshkit.errors import PlanError

Before = Mapping[str, "ref[nn.Parameter]"]
# An attribute of the parameter and no table by id: it goes when the parameter goes, and a new one never inherits it.
_KEY = "_meshkit_replaced"
# When there were how many models, and parameters in its groups: `add_param_group` may bring others later.
_looked: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
_models = 0


def parameters_before(model: nn.Module) -> Before:
    """By name. Weak: a parameter that nobody else holds is freed as soon as its shard is there."""
    return {name: ref(param) for name, param in model.named_parameters(remove_duplicate=False)}


def look_at_optimizers(model: nn.Module, before: Before) -> None:
    """From now on each optimizer's first step, and the first with a group that was added, raises PlanError if it holds
    parameters that this model had `before` and has no more, and if it cannot compute with shards."""
    global _models
    now = dict(model.named_parameters(remove_duplicate=False))
    replaced(
        {
            name: param
            for name, old in before.items()
            if (param := old()) is not None and name in now and now[name] is not param
        }
    )
    if not _models:
        register_optimizer_step_pre_hook(_look)
    _models += 1


def replaced(params: Mapping[str, nn.Parameter]) -> None:
    """From now on an optimizer that holds one of these, by their names, is refused: others are in their place."""
    for name, param in params.items():
        setattr(param, _KEY, name)


def _look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    looked = _models, sum(len(group["params"]) for group in optimizer.param_groups)
    if _looked.get(optimizer) == looked:
        return
    kind = type(optimizer).__name__
    if old := [name for param in _params(optimizer) if (name := getattr(param, _KEY, None)) is not None]:
        raise PlanError(
            f"{kind}: {len(old)} of its parameters, {old[0]!r} first, are those that the model had before it was split or "
            "moved, and shards are in place of them: a step would change nothing. Make the optimizer after parallelize, of "
            "run.parameters(), or by mk.adamw(run), and give it to run.move(optimizer=...)."
        )
    if isinstance(optimizer, torch.optim.Adafactor) and any(isinstance(param, DTensor) for param in _params(optimizer)):
        raise PlanError(
            f"{kind}: it scales each step by norms and means of rows and columns of whole matrices, which it has no way to "
            "compute of shards. For moments of few bytes use mk.adamw(run) with OptimizerPolicy(states='8bit') or 'fp8'; "
            "torch's SGD, NAdam, RAdam, Adamax, Adadelta and ASGD run on shards."
        )
    _looked[optimizer] = looked


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])
