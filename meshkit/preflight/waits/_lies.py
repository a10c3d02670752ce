"""Where each tensor of a run on CPU would lie on a GPU: on the device, or on the host, in pageable or in pinned memory.

By its storage. What a run makes says it: `device=` and `.to()` of the mesh's device, or of that of a tensor on it, make
tensors on the device; without one they are on the host. Results lie where the inputs do. What is older than the recording is
found out where it meets a tensor that is known, since all inputs of an operator are on one device.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshkit.core import _torch

Memory = Literal["device", "pageable", "pinned"]


class Lies:
    """A tensor's memory, or None where it is not known: `lies[tensor]`."""

    def __init__(self) -> None:
        # A weak reference keeps the number of a storage from being given to another.
        self._known: dict[int, tuple[StorageWeakRef, Memory]] = {}
        self._sweep_at = 1 << 14

    def __getitem__(self, tensor: Tensor) -> Memory | None:
        storage = _storage(tensor)
        known = None if storage is None else self._known.get(storage._cdata)
        return None if known is None else known[1]

    def __setitem__(self, tensor: Tensor, memory: Memory) -> None:
        storage = _storage(tensor)
        if storage is None:
            return
        self._known[storage._cdata] = StorageWeakRef(storage), memory
        if len(self._known) > self._sweep_at:
            self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
            self._sweep_at = max(1 << 14, 2 * len(self._known))


def _storage(tensor: Tensor) -> Any:
    """None of a tensor that has no memory of its own."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if _torch.is_fake(tensor) or tensor.is_meta or _torch.wraps_tensors(type(tensor)):
        return None
    return tensor.untyped_storage()
