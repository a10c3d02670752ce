"""What autograd gets in place of a tensor that it saves, and the storage behind it."""

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
    """One storage as it was at one version, moved once however many tensors lie in it.

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
        """Whether it holds the tensor's storage as it is now. The address of a storage that is gone is not used again while
        a weak reference to it lives, so an equal address is the same storage."""
        return self.version == tensor._version and not self.origin.expired()


class Kept:
    """A saved tensor that stays, and is checked for changes as autograd would."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # A saved output that held itself would be a cycle through its node.
        self.tensor, self.version = tensor.detach(), tensor._version

    def restore(self) -> Tensor:
        refuse_changed(self.tensor, self.version, self.tensor.shape)
        return self.tensor


class Handle:
    """A saved tensor that lies in a parcel: where, and how it is seen.

    When autograd drops it, in whatever thread and at whatever moment, it only leaves a note in `dropped`.
    """

    __slots__ = ("dropped", "dtype", "guard", "offset", "parcel", "round", "shape", "stride", "version")

    def __init__(self, tensor: Tensor, parcel: SavedStorage, dropped: SimpleQueue[tuple[SavedStorage, int]]) -> None:
        self.parcel, self.dropped, self.round = parcel, dropped, 0
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.offset, self.version = tensor.storage_offset(), tensor._version
        # An alias shares the version counter, and keeps it when it is given other data: it sees changes, and holds nothing.
        self.guard = tensor.detach()
        fake = _torch.is_fake(tensor)  # belongs to one estimate, and must not be remembered
        self.guard.data = tensor.new_empty(0) if fake else _nothing(tensor.dtype, tensor.device)

    def __del__(self) -> None:
        self.dropped.put((self.parcel, self.round))

    def view(self, data: Tensor) -> Tensor:
        """The tensor in `data`, the bytes of its storage."""
        if _torch.is_fake(data):
            return data.view(self.dtype).as_strided(self.shape, self.stride, self.offset)
        empty = torch.empty(0, dtype=self.dtype, device=data.device)
        return empty.set_(data.untyped_storage(), self.offset, self.shape, self.stride)

    def refuse_changed(self) -> None:
        refuse_changed(self.guard, self.version, self.shape)


def bytes_of(tensor: Tensor) -> Tensor:
    """Its whole storage, [nbytes] uint8, with a version counter of its own.

    `set_` of a storage without values never lets go of it (2.11, 2.15), so those are looked at in another way.
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


# Where bytes wait: the seam between what is moved and where to.


class Stored(Protocol):
    """The bytes of one storage, on their way out, away, or on their way back."""

    @property
    def left(self) -> Event:
        """When the device's copy is no longer read."""
        ...

    def fetch(self, target: Tensor) -> bool:
        """Begin to fill `target` [nbytes] uint8 on the device. True if they come from the tier, False if they had not yet
        left memory on the way there. Called again only after `arrive`.
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
        """Take back what has become free, and raise what has gone wrong since."""
        ...

    @property
    def peak_bytes(self) -> int: ...

    def describe(self) -> str: ...
