"""Changes of a model after it was split: parameters that are made, and hooks that are put on shards, are no data rank's."""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary

from torch import nn

from meshkit.errors import PlanError

Slots = WeakKeyDictionary[nn.Module, Collection[str]]


def parameter_slots(model: nn.Module) -> Slots:
    """The names of the parameters that each module has itself."""
    return WeakKeyDictionary({module: tuple(module._parameters) for module in model.modules()})


def refuse_later_changes(model: nn.Module, slots: Slots) -> None:
    """slots: of the model when it was split over data ranks.

    Raises: PlanError for a trained parameter that came later, and for a hook on the gradient of one.
    """
    for name, module in model.named_modules():
        known = slots.get(module, ())
        for key, param in module._parameters.items():
            if param is None or not param.requires_grad:
                continue
            where = repr(f"{name}.{key}".lstrip("."))
            if key not in known:
                raise PlanError(
                    f"parameter {where} was made after parallelize: no data rank sums its gradient with "
                    "the others. Change the model first, and give parallelize the changed one."
                )
            if param._backward_hooks:
                raise PlanError(
                    f"parameter {where} has got a hook on its gradient after parallelize: there it is a "
                    "shard, whose hooks do not run in backward. Register it before parallelize, which runs it on the whole "
                    "gradient; or change param.grad between forward_backward and the optimizer's step."
                )
