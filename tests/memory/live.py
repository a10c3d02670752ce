"""What is alive: bytes of results that backward still holds, counted from real storages."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshkit.core._torch import TorchDispatchMode, tree_leaves


class Live(TorchDispatchMode):
    """Counts the memory that operators made inside the context, each storage once; `known` tensors are left out."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.known:
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        return out

    @property
    def bytes(self) -> int:
        self.made = {key: found for key, found in self.made.items() if not found[0].expired()}
        return sum(size for _, size in self.made.values())


def held_bytes(model: nn.Module, rows: int, tokens: int, known: Iterable[Tensor] = ()) -> int:
    """What backward holds after the forward of rows of `tokens` tokens, without what lies in the memory of `known`."""
    locals_ = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    with Live([*locals_, *known, ids]) as live:
        out = model(ids)
        assert out.requires_grad
    time.sleep(0.1)  # threads of gloo let go of what they sent a moment later
    return live.bytes
