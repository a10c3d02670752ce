"""Counting live bytes and time of code, operator by operator. Works on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from meshkit.core import _torch
from meshkit.core._torch import TorchDispatchMode, tree_leaves
from meshkit.strategy import Rates


class Kept(TorchDispatchMode):
    """Bytes of storages that operators allocated inside the context and that are still alive, without those of `known`."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known = {_torch.storage_key(tensor) for tensor in known}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _torch.storage_key(leaf) not in self._known:
                # A weak reference: what is alive after the forward is what backward needs, and this must not keep it so.
                storage = leaf.untyped_storage()
                self._made[_torch.storage_key(leaf)] = StorageWeakRef(storage), storage.nbytes()
        return out

    @property
    def bytes(self) -> int:
        return sum(size for storage, size in self._made.values() if not storage.expired())


class Work(TorchDispatchMode):
    """Seconds of the operators inside the context, one after another, each at the rate that bounds it (roofline)."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        self.rates, self.seconds = rates, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(result.alias_info is not None for result in func._schema.returns):
            return out  # a view or an in-place operator: no new memory
        output_bytes, input_bytes = _bytes(out), _bytes((args, kwargs))
        # Messages count by their larger end: an all-gather's output, a reduce-scatter's input.
        counted = flop_registry.get(func.overloadpacket)
        if counted is None and func.namespace in ("_c10d_functional", "meshkit"):
            self.seconds += max(output_bytes, input_bytes) / self.rates.link_bytes_per_s
            return out
        flops = counted(*args, **kwargs, out_val=out) if counted is not None else 0
        self.seconds += max(
            flops / self.rates.flops_per_s, (output_bytes + input_bytes) / self.rates.memory_bytes_per_s
        )
        return out


def _bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
