"""Operators: what is launched, what reads values of the device, and what is copied between it and the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from meshkit.core import _torch
from meshkit.core._torch import TorchDispatchMode, tree_leaves
from meshkit.core.custom_op import watching_bodies
from meshkit.preflight._collectives import SPACES, WAITS
from meshkit.preflight._where import where
from meshkit.preflight.waits._lies import Lies, Memory
from meshkit.preflight.waits._step import Wait, Waits

_INDEXED = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_unsafe_index", "aten::_index_put_impl_")
_COPIES = ("aten::copy_", "aten::_foreach_copy_")
# Operators that launch nothing: they make memory, or read what the host knows.
_LAUNCH_NOTHING = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("lift_fresh", "set_", "resize_", "record_stream", "_local_scalar_dense"),
)


class Operators(TorchDispatchMode):
    """Sees what is launched and what reads values, in backward too."""

    def __init__(self, waits: Waits, lies: Lies) -> None:
        super().__init__()
        self.waits, self.lies = waits, lies
        self.silent = 0  # inside of a collective of objects

    @watching_bodies
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_torch.wraps_tensors(kind) for kind in types):
            return NotImplemented  # a tensor made of tensors: those inside are counted when it gets to them
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if self.silent or any(map(_torch.is_fake, leaves)):
            return func(*args, **kwargs)
        name = func.name().partition(".")[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        memory = self._before(func, name, args, kwargs, tensors)
        out = func(*args, **kwargs)
        if memory is not None:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and self.lies[leaf] is None:
                    self.lies[leaf] = memory
        return out

    def _before(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Memory | None:
        """Counts the operator. Returns where its results lie."""
        if name in _COPIES:
            return self._copy(name, args)
        index: list[Tensor] = []
        if name in _INDEXED:  # which may lie on the host; then each call copies them
            index = [each for each in args[1] if each is not None]
            tensors = [each for each in tensors if all(each is not other for other in index)]
        known = {self.lies[tensor] for tensor in tensors} - {None}
        known |= {
            "device" for each in index if self.lies[each] == "device"
        }  # it is taken for a tensor of the device alone
        on_device = "device" in known
        for tensor in tensors:
            there = self.lies[tensor]
            if there is None and known and (tensor.ndim or not on_device):
                self.lies[tensor] = "device" if on_device else "pageable"
            elif there not in (None, "device") and on_device and tensor.ndim:  # a scalar is an argument of the kernel
                self.waits.mixed.append(Wait(name, where()))
        space, _, op = name.partition("::")
        if known and not on_device:
            if space in SPACES and op not in WAITS:
                self.wait(f"{op} on the host")
            return "pageable"
        if space in SPACES:
            self.waits.collectives[op] += op not in WAITS
        if not on_device:
            return None
        if _reads(func, name, kwargs, index):
            self.wait(name)
        for each in index:
            if self.lies[each] != "device":
                self.copied(each, blocking=self.lies[each] != "pinned", what="an index")
        if space not in SPACES and op not in _LAUNCH_NOTHING and not func.is_view:
            self.waits.launches[op] += 1
        return "device"

    def _copy(self, name: str, args: Any) -> Memory | None:
        targets, sources = (args[0], args[1]) if isinstance(args[0], list | tuple) else ([args[0]], [args[1]])
        blocking = not (args[2] if len(args) > 2 else False)
        memory: Memory | None = None
        launched = False
        for target, source in zip(targets, sources, strict=True):
            to, of = self.lies[target], self.lies[source]
            memory = to or memory
            if to is None and of == "device":
                self.lies[target] = memory = to = "device"
            if of is None and to == "device" and source.ndim:
                self.lies[source] = of = "device"
            launched |= to == "device"
            if to == "device" and of in ("pageable", "pinned"):
                self.copied(source, blocking=blocking or of == "pageable", what="a tensor")
            elif of == "device" and to in ("pageable", "pinned") and (blocking or to == "pageable"):
                self.wait("copy to the host")
        self.waits.launches[name.partition("::")[2]] += launched
        return memory

    # -------------------------------------------------------------------------------------------- told by functions

    def wait(self, why: str) -> None:
        if not self.silent:
            self.waits.waits.append(Wait(why, where()))

    def copied(self, source: Tensor, *, blocking: bool, what: str) -> None:
        """From the host to the device."""
        self.waits.copied_bytes += source.nbytes
        if blocking:
            self.wait(f"copy of {what} to the device")

    def with_objects(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.wait(name)
            return unseen(*args, **kwargs)

        unseen = self.unseen(function)
        return call

    def unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is done in it is of the host alone, or counted already."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.silent += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.silent -= 1

        return call


def _reads(func: Any, name: str, kwargs: Any, index: list[Tensor]) -> bool:
    """Whether the host has to know values of the device, or how many there are of them."""
    if name in _INDEXED:
        return any(each.dtype in (torch.bool, torch.uint8) for each in index)
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
