"""Backwards that a model writes itself (torch.autograd.Function, hooks on tensors and modules): operators do not show them.

Each is noted as an operation on the tensor whose gradient it changes. One that treats a gradient element by element may run on
a part of it; of another nothing is known, and it must see the whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from meshkit.core._torch import TorchDispatchMode, tree_leaves, tree_map
from meshkit.core._torch import functions_replaced as _replaced

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
def backwards_noted(note: Note) -> Iterator[None]:
    """Inside, each function with a backward of its own is noted when it is called."""

    def apply(kind: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kind is CheckpointFunction and not kwargs:
            return args[0](*args[2:])  # it computes the same again; without autograd its gradients would not be seen
        out = original(*args, **kwargs)
        known = kind.__module__.startswith(("meshkit.", "torch.")) and kind.__name__ != "BackwardHookFunction"
        if not known and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))):
            runs = None if kind.__module__.startswith("torch.") else _backward_of(kind, out)
            note(OF_ALL if runs is None else OF_ELEMENTS, (args, kwargs), runs, out)
        return out

    with _replaced(apply):
        yield


def hook_noted(tensor: Tensor, hook: Callable[[Tensor], Any], note: Note) -> None:
    """Of Tensor.register_hook. One that only looks at the gradient changes nothing."""
    changes, runs = True, None
    try:
        runs, changes = _elementwise(hook, (tensor,))
    except Exception:
        pass  # it needs values
    if changes:
        note(OF_ALL if runs is None else OF_ELEMENTS, (tensor,), runs, tensor)


def _backward_of(kind: Any, out: Any) -> Any:
    outputs = tuple(out) if isinstance(out, tuple | list) else (out,)
    node = next((leaf.grad_fn for leaf in outputs if isinstance(leaf, Tensor) and leaf.grad_fn is not None), None)
    try:
        return _elementwise(lambda *grads: kind.backward(node, *grads), outputs)[0]
    except Exception:
        return None


def _elementwise(function: Callable[..., Any], like: tuple[Any, ...]) -> tuple[Any, bool]:
    """(the operators that a function of gradients runs, with their numbers; None if one is not element by element; whether it
    returns or writes something)."""
    grads = [torch.empty_like(each) if isinstance(each, Tensor) else None for each in like]
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
