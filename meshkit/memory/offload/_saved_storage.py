"""Saved tensors of activation offload: the handles that autograd keeps, and the moved storages behind them."""

from __future__ import annotations

from functools import lru_cache
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshkit.core import _torch
from meshkit.errors import OffloadError
from meshkit.memory.offload._streams import Event


class SavedStorage:
    """One storage at one version, moved once however many saved tensors share it.

    source: its bytes on the device while they leave. back: its bytes once they are fetched, until every handle has been
    used once (a round); a second backward begins another round.
    """

    __slots__ = (
        "__weakref__",
        "arriving",
        "back",
        "live",
        "nbytes",
        "origin",
        "round",
        "source",
        "stored",
        "unseen",
        "version",
    )

    def __init__(self, origin: StorageWeakRef, version: int, source: Tensor, stored: Stored) -> None:
        self.origin, self.version, self.nbytes = origin, version, source.numel()
        self.source: Tensor | None = source
        self.stored = stored
        self.back: Tensor | None = None
        self.arriving = False
        self.live = self.unseen = 0
        self.round = 1

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is the tensor's storage at its present version.

        Callers compare addresses. While a weak reference to a freed storage lives, its address is not reused, so equal
        addresses mean the same storage.
        """
        return self.version == tensor._version and not self.origin.expired()


class Kept:
    """A saved tensor that stays, and is checked for changes as autograd would."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: a node that saved its own output with its graph would be a reference cycle.
        self.tensor, self.version = tensor.detach(), tensor._version

    def restore(self) -> Tensor:
        refuse_changed(self.tensor, self.version, self.tensor.shape)
        return self.tensor


class Handle:
    """Stands for a saved tensor in autograd: a view (dtype, shape, strides, offset) of a `SavedStorage`.

    Autograd may drop it in any thread at any moment, even while a lock is held, so `__del__` only puts it into a queue.
    """

    __slots__ = ("dropped", "dtype", "guard", "offset", "round", "saved", "shape", "stride", "version")

    def __init__(self, tensor: Tensor, saved: SavedStorage, dropped: SimpleQueue[tuple[SavedStorage, int]]) -> None:
        self.saved, self.dropped, self.round = saved, dropped, 0
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.offset, self.version = tensor.storage_offset(), tensor._version
        # A detached alias shares the version counter, also after it is given other (empty) data: it shows in-place changes
        # without keeping the storage alive.
        self.guard = tensor.detach()
        fake = _torch.is_fake(tensor)  # belongs to one estimate, and must not be remembered
        self.guard.data = tensor.new_empty(0) if fake else _nothing(tensor.dtype, tensor.device)

    def __del__(self) -> None:
        self.dropped.put((self.saved, self.round))

    def view(self, data: Tensor) -> Tensor:
        """The tensor in `data`, the bytes of its storage."""
        if _torch.is_fake(data):
            return data.view(self.dtype).as_strided(self.shape, self.stride, self.offset)
        empty = torch.empty(0, dtype=self.dtype, device=data.device)
        return empty.set_(data.untyped_storage(), self.offset, self.shape, self.stride)

    def refuse_changed(self) -> None:
        refuse_changed(self.guard, self.version, self.shape)


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's whole storage as [nbytes] uint8, with a version counter of its own.

    Fake tensors take another way: `set_` of a fake storage leaks it (torch 2.11 and 2.15).
    """
    storage = tensor.untyped_storage()
    if _torch.is_fake(tensor):
        return tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0).view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def refuse_changed(tensor: Tensor, version: int, shape: torch.Size) -> None:
    if tensor._version != version:
        raise OffloadError(
            f"activation offload: a {tensor.dtype} tensor of shape {tuple(shape)} that backward needs was changed in place: "
            f"it was saved at version {version} and is now at version {tensor._version}. Change a clone of it."
        )


@lru_cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


# Tiers: the interface between the engine and the places where bytes wait.


class Stored(Protocol):
    """The bytes of one storage: being copied out, stored, or being copied back."""

    @property
    def left(self) -> Event:
        """The event after which the copy out no longer reads the device's memory."""
        ...

    def fetch(self, target: Tensor) -> bool:
        """Start to fill `target`, [nbytes] uint8 on the device. Called again only after `arrive`.

        Returns True if the bytes come from the tier, False if they are forwarded from memory of a store still under way.
        """
        ...

    def arrive(self) -> None:
        """Let compute wait until the target is filled. Called once after each fetch, before the target is used or freed."""
        ...

    def release(self) -> None:
        """The bytes are not needed any more, and no fetch is under way."""
        ...


class Tier(Protocol):
    waited_s: float  # by the host, for room or for the disk

    def store(self, source: Tensor) -> Stored:
        """Begin to move `source`, [nbytes] uint8 on the device. The caller keeps it until `left`."""
        ...

    def tidy(self) -> None:
        """Free what is no longer used, and raise errors of background work."""
        ...

    def end_step(self) -> None:
        """A step is over. After the first that has moved something the host waits for the device, and memory is pinned."""
        ...

    @property
    def peak_bytes(self) -> int: ...

    def describe(self) -> str: ...
