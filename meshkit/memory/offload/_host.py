"""The first tier: pinned host memory."""

from __future__ import annotations

from torch import Tensor

from meshkit.memory.offload._arena import SLAB_BYTES, Arena, Piece
from meshkit.memory.offload._streams import Event, Streams
from meshkit.memory.place import made_on_host


class HostSpace:
    """Slabs of host memory and pieces of them as tensors."""

    def __init__(self, streams: Streams, *, slab_bytes: int = SLAB_BYTES) -> None:
        self._slabs: list[Tensor] = []
        self._streams = streams
        self.arena = Arena(self._add, slab_bytes=slab_bytes)

    def view(self, piece: Piece, nbytes: int) -> Tensor:
        """The first `nbytes` of the piece."""
        return self._slabs[piece.slab].narrow(0, piece.offset, nbytes)

    def _add(self, index: int, nbytes: int) -> None:
        self._slabs.append(made_on_host(lambda: self._streams.slab(nbytes)))


class HostTier:
    """Copies out and in; the device waits, the host never does."""

    def __init__(self, streams: Streams, *, reserve: int = 0, slab_bytes: int = SLAB_BYTES) -> None:
        self.streams = streams
        self.space = HostSpace(streams, slab_bytes=slab_bytes)
        self.space.arena.reserve(reserve)
        self.waited_s = 0.0

    def store(self, source: Tensor) -> InHost:
        piece = self.space.arena.take(source.numel())
        host = self.space.view(piece, source.numel())
        return InHost(self, piece, host, self.streams.store(source, host))

    def tidy(self) -> None:
        return None

    @property
    def peak_bytes(self) -> int:
        return self.space.arena.peak_bytes

    def describe(self) -> str:
        pinned = "pinned " if self.streams.device.type == "cuda" else ""
        return f"{pinned}host memory, {self.space.arena.total_bytes / 2**20:,.1f} MiB taken"


class InHost:
    def __init__(self, tier: HostTier, piece: Piece, host: Tensor, left: Event) -> None:
        self._tier, self._piece, self._host, self._left = tier, piece, host, left
        self._coming: Event | None = None

    @property
    def left(self) -> Event:
        return self._left

    def fetch(self, target: Tensor) -> bool:
        streams = self._tier.streams
        # Marked now, after `target` was allocated: its memory may be that of a tensor which kernels queued before still use.
        self._coming = streams.fetch(self._host, target, (self._left, streams.mark()))
        return True

    def arrive(self) -> None:
        assert self._coming is not None
        self._tier.streams.wait(self._coming)
        self._coming = None

    def release(self) -> None:
        # See [Note: who waits for whom]: the next store into this piece comes after both copies.
        self._tier.space.arena.give(self._piece)
