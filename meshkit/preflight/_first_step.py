"""First steps, in which a model makes what it keeps (a table of cosines, a mask), are no steps to go by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from meshkit.core._torch import tree_leaves
from meshkit.program import is_record

Found = TypeVar("Found")
_TABLES = frozenset(vars(nn.Module())) - {"_buffers"}
_PLAIN = (bool, int, float, str, type(None))


def after_first(model: nn.Module, step: Callable[[], Found]) -> Found:
    """What `step` returns of a step like all later ones: it runs once more where the first has changed what modules hold."""
    before = _held(model)
    found = step()
    now = _held(model)
    if before.keys() == now.keys() and all(_same(value, now[key]) for key, value in before.items()):
        return found
    model.zero_grad()  # or gradients would be added to those of the first
    return step()


def _held(model: nn.Module) -> dict[tuple[str, str, int], Any]:
    """Tensors and plain values that modules hold beside parameters and modules."""
    return {
        (name, key, place): leaf
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _TABLES
        for place, leaf in enumerate(tree_leaves(vars(value) if is_record(value) else value))
        if isinstance(leaf, (Tensor, *_PLAIN))
    }


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)
