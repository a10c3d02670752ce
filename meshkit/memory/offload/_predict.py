"""Predicting activation offload: the bytes it would move and leave on the device, without moving anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from meshkit.core import _torch
from meshkit.memory.offload._offload import BLOCKS_LEAVING
from meshkit.strategy import ActivationOffload


class Moved(saved_tensors_hooks):
    """Inside, saved tensors that offload would move are dropped, so that what is alive afterwards stays on the device.

    For fake tensors, and a forward without backward. staying: parameters, buffers, and inputs that need no
    gradient.
    """

    def __init__(self, policy: ActivationOffload, staying: Iterable[Tensor]) -> None:
        super().__init__(self._pack, self._unpack)
        self._least, self._staying = policy.min_bytes, {_torch.storage_key(tensor) for tensor in staying}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}  # while referred to, no other has the same key

    @property
    def bytes(self) -> int:
        """Bytes that would be moved, each storage once."""
        return sum(size for _, size in self._storages.values())

    def _pack(self, tensor: Tensor) -> Tensor | None:
        key, storage = _torch.storage_key(tensor), tensor.untyped_storage()
        if key in self._staying or storage.nbytes() < self._least:
            # Detached, as `Kept` does: a node that saved its own output would be a reference cycle, and count as kept.
            return tensor.detach()
        if key not in self._storages:
            self._storages[key] = StorageWeakRef(storage), storage.nbytes()
        return None

    def _unpack(self, packed: Any) -> Tensor:
        raise AssertionError("what is saved here has no values and no backward")


def bytes_on_device(moved_bytes: Sequence[int], policy: ActivationOffload) -> int:
    """Peak bytes on the device of the saved tensors that offload would move, over the blocks of one forward and backward.

    moved_bytes: bytes that each block saves, in order, each storage once, after recompute. Parameters, buffers, inputs that
    need no gradient and storages below `min_bytes` do not count: they stay on the device under every policy.
    In forward these are the last `keep_last` blocks, and at most two blocks before them whose copies are under way (one on a
    CPU, where copies are done at once). In backward: a block and the `ahead` blocks before it.
    """
    count = len(moved_bytes)
    first_kept = max(0, count - policy.keep_last)
    kept_bytes = list(moved_bytes[first_kept:])
    moved = list(moved_bytes[:first_kept])
    forward = max(
        (sum(moved[max(0, block + 1 - BLOCKS_LEAVING) : block + 1]) for block in range(first_kept)), default=0
    )
    end_of_forward = sum(kept_bytes) + sum(moved[max(0, first_kept - BLOCKS_LEAVING) :])
    backward = max((sum(moved[max(0, block - policy.ahead) : block + 1]) for block in range(first_kept)), default=0)
    return max(forward, end_of_forward, backward)
