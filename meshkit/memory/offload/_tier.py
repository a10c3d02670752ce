"""Where bytes wait: the seam between what is moved and where to."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from meshkit.memory.offload._streams import Event


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
