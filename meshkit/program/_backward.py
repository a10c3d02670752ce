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

from meshkit.core._torch import (
    TorchDispatchMode,
    functions_replaced,
    graph_node,
    packs_saved,
    storage_key,
    tree_leaves,
    tree_map,
)

OF_ELEMENTS, OF_ALL = "backward of elements", "backward of all"
# (operation, tensors whose gradients it makes, numbers it uses, outputs, tensors that it reads)
Note = Callable[[str, Any, Any, Any, Sequence[Tensor]], None]
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
    node = graph_node(tensor)
    if not isinstance(node, BackwardCFunction):
        return None
    kind: Any = node._forward_cls  # type: ignore[attr-defined]
    # Those of torch that run a model's own: hooks of a module, and functions under vmap.
    hides = kind.__name__ == "BackwardHookFunction" or kind.__module__.startswith("torch._functorch.")
    return None if kind.__module__.startswith(("meshkit.", "torch.")) and not hides else node


def kind_of(node: Any) -> tuple[str, Any, list[Tensor]]:
    """(OF_ELEMENTS or OF_ALL, the operators of the backward and their numbers, tensors that it reads beside gradients)."""
    if node._forward_cls.__module__.startswith("torch."):
        return OF_ALL, None, []  # it does not show what it runs
    try:
        grads = [torch.empty(each.shape, dtype=each.dtype) for each in node._input_metadata]
        runs, _, reads = _elementwise(lambda *given: node._forward_cls.backward(node, *given), grads)
    except Exception:
        return OF_ALL, None, []
    return (OF_ALL, None, []) if runs is None else (OF_ELEMENTS, runs, reads)


def hook_noted(tensor: Tensor, hook: Callable[[Tensor], Any], note: Note) -> None:
    """Of Tensor.register_hook. One that only looks at the gradient changes nothing."""
    changes, runs, reads = True, None, list[Tensor]()
    with suppress(Exception):  # of one that needs values
        runs, changes, reads = _elementwise(hook, [torch.empty_like(tensor)])
    if changes:
        note(OF_ALL if runs is None else OF_ELEMENTS, (tensor,), runs, tensor, reads)


class HookedNode:
    """A tensor's `grad_fn` as a model sees it that may hang hooks on it, which nothing else would show. hooked: is called."""

    def __init__(self, node: Any, hooked: Callable[[], None]) -> None:
        self._node, self._hooked = node, hooked

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            self._hooked()
        return getattr(self._node, name)


def saves_otherwise() -> bool:
    """Whether backward will read what a model's own `saved_tensors_hooks` make of a tensor. Those of torch give it back."""
    pack = packs_saved()
    return pack is not None and not str(getattr(pack, "__module__", "")).startswith(("torch.", "meshkit."))


def _elementwise(function: Callable[..., Any], grads: Sequence[Tensor]) -> tuple[Any, bool, list[Tensor]]:
    """(the operators that a function of gradients runs, with their numbers; None if one is not element by element; whether it
    returns or writes something; tensors that it reads beside the gradients)."""
    seen = _Seen(grads)
    with torch.no_grad(), seen:
        result = function(*grads)
    returned = any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))
    return (tuple(seen.runs) if seen.elementwise else None), returned or seen.writes, list(seen.reads.values())


class _Seen(TorchDispatchMode):
    def __init__(self, grads: Sequence[Tensor]) -> None:
        super().__init__()
        self.runs: list[Any] = []
        self.elementwise, self.writes = True, False
        self.reads: dict[int, Tensor] = {}
        self._own = {storage_key(each): each for each in grads}  # gradients, and what is made of them; kept alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        self.elementwise &= name in _HARMLESS or torch.Tag.pointwise in func.tags
        self.writes |= func._schema.is_mutable
        if name not in _HARMLESS:  # their sizes are those of the part
            self.runs.append((str(func), tree_map(lambda leaf: None if isinstance(leaf, Tensor) else leaf, args)))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and storage_key(leaf) not in self._own:
                self.reads[id(leaf)] = leaf
        out = func(*args, **kwargs)
        self._own.update({storage_key(leaf): leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)})
        return out
