"""Backwards that a model writes itself (torch.autograd.Function, hooks on tensors and modules): operators do not show them.

Each is noted as an operation on the tensor whose gradient it changes. One that treats a gradient element by element may run
on a part of it; of another nothing is known, and it must see the whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from meshkit.core._torch import TorchDispatchMode, functions_replaced, tree_leaves, tree_map

OF_ELEMENTS, OF_ALL = "backward of elements", "backward of all"
Note = Callable[[str, Any, Any, Any], None]  # (operation, tensors whose gradients it makes, numbers it uses, outputs)
# What moves nothing and reads nothing.
_HARMLESS = frozenset(
    (
        "view",
        "_unsafe_view",
        "clone",
        "detach",
        "alias",
        "_to_copy",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
    )
)


@contextmanager
def checkpoints_run() -> Iterator[None]:
    """Inside, a checkpoint with a backward of its own runs as what it computes, with autograd."""

    def apply(kind: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0](*args[2:]) if kind is CheckpointFunction else original(*args, **kwargs)

    with functions_replaced(apply):
        yield


def own_backward(tensor: Tensor) -> Any:
    """The node of the function with a backward of its own that returned the tensor; None of any other tensor."""
    node = tensor.grad_fn
    if not isinstance(node, BackwardCFunction):
        return None
    kind: Any = node._forward_cls  # type: ignore[attr-defined]
    trusted = kind.__module__.startswith(("meshkit.", "torch.")) and kind.__name__ != "BackwardHookFunction"
    return None if trusted else node


def kind_of(node: Any) -> tuple[str, Any]:
    """(OF_ELEMENTS or OF_ALL, the operators of the backward and their numbers)."""
    if node._forward_cls.__module__.startswith("torch."):
        return OF_ALL, None  # a module's hooks, which it does not show
    try:
        grads = [torch.empty(each.shape, dtype=each.dtype) for each in node._input_metadata]
        runs = _elementwise(lambda *given: node._forward_cls.backward(node, *given), grads)[0]
    except Exception:
        runs = None
    return (OF_ALL if runs is None else OF_ELEMENTS), runs


def hook_noted(tensor: Tensor, hook: Callable[[Tensor], Any], note: Note) -> None:
    """Of Tensor.register_hook. One that only looks at the gradient changes nothing."""
    changes, runs = True, None
    with suppress(Exception):  # of one that needs values
        runs, changes = _elementwise(hook, [torch.empty_like(tensor)])
    if changes:
        note(OF_ALL if runs is None else OF_ELEMENTS, (tensor,), runs, tensor)


def _elementwise(function: Callable[..., Any], grads: Sequence[Tensor]) -> tuple[Any, bool]:
    """(the operators that a function of gradients runs, with their numbers; None if one is not element by element; whether it
    returns or writes something)."""
    seen = _Seen()
    with torch.no_grad(), seen:
        result = function(*grads)
    returned = any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))
    return (tuple(seen.runs) if seen.elementwise else None), returned or seen.writes


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Any] = []
        self.elementwise, self.writes = True, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        self.elementwise &= name in _HARMLESS or torch.Tag.pointwise in func.tags
        self.writes |= func._schema.is_mutable
        if name not in _HARMLESS:  # their sizes are those of the part
            self.runs.append((str(func), tree_map(lambda leaf: None if isinstance(leaf, Tensor) else leaf, args)))
        return func(*args, **kwargs)
