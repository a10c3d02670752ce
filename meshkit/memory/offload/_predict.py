"""What offload moves, and what it leaves on the device, without moving anything."""

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
    """Inside, what autograd saves is let go where offload would move it: what is alive afterwards is what stays.

    For tensors without values, and a forward without backward. staying: parameters, buffers, and inputs that need no
    gradient.
    """

    def __init__(self, policy: ActivationOffload, staying: Iterable[Tensor]) -> None:
        super().__init__(self._pack, self._unpack)
        self._least, self._staying = policy.min_bytes, {_torch.storage_key(tensor) for tensor in staying}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}  # while referred to, no other has the same key

    @property
    def bytes(self) -> int:
        """Of all that would be moved, each storage once."""
        return sum(size for _, size in self._storages.values())

    def _pack(self, tensor: Tensor) -> Tensor | None:
        key, storage = _torch.storage_key(tensor), tensor.untyped_storage()
        if key in self._staying or storage.nbytes() < self._least:
            return tensor.detach()
        if key not in self._storages:
            self._storages[key] = StorageWeakRef(storage), storage.nbytes()
        return None

    def _unpack(self, packed: Any) -> Tensor:
        raise AssertionError("what is saved here has no values and no backward")


def bytes_on_device(moved_bytes: Sequence[int], policy: ActivationOffload) -> int:
    """The most that is on the device, of what the blocks of one forward save and offload would move.

    moved_bytes: of each block in order, each storage once: what it saves without its parameters and buffers, inputs that
    need no gradient, and storages below `min_bytes`; with recompute, what that leaves. What is left out here stays on the
    device whatever the policy, in all blocks.
    Forward: the last `keep_last` blocks, and before them at most two that leave, if copies are as slow as can be (on a CPU
    they are done at once: one). Backward: a block and the `ahead` before it, beside those of the last that are not done.
    """
    count = len(moved_bytes)
    first_kept = max(0, count - policy.keep_last)
    kept = list(moved_bytes[first_kept:])
    moved = list(moved_bytes[:first_kept])
    forward = max(
        (sum(moved[max(0, block + 1 - BLOCKS_LEAVING) : block + 1]) for block in range(first_kept)), default=0
    )
    end_of_forward = sum(kept) + sum(moved[max(0, first_kept - BLOCKS_LEAVING) :])
    backward = max((sum(moved[max(0, block - policy.ahead) : block + 1]) for block in range(first_kept)), default=0)
    return max(forward, end_of_forward, backward)
