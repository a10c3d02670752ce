"""The host tier of activation offload: pinned memory, allocated in slabs."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from meshkit.core.host_accounting import made_on_host
from meshkit.memory.offload._streams import Event, Streams

# An arena allocator: pieces of a few large slabs. It does not grow after the step with the peak.

PAGE = 4096  # what O_DIRECT wants offsets, lengths and addresses to be multiples of
SLAB_BYTES = 64 << 20


def round_up(nbytes: int, multiple: int = PAGE) -> int:
    """Bytes that a piece takes of the host or the disk: whole pages."""
    return -(-nbytes // multiple) * multiple


class Piece(NamedTuple):
    """`nbytes` from `offset` on in one slab, both multiples of PAGE."""

    slab: int
    offset: int
    nbytes: int


class Arena:
    """First fit, and neighbours join when they come back. Forward takes and backward gives back in reverse, so holes are few.

    grow(index, nbytes) allocates one more slab; if it raises, the arena is unchanged. Slabs are large, because each costs a
    pinning or a file: at least `slab_bytes`, and a quarter of what there is. Safe to use from several threads.
    """

    def __init__(self, grow: Callable[[int, int], None], *, slab_bytes: int = SLAB_BYTES) -> None:
        self._grow, self._slab_bytes = grow, slab_bytes
        self._free: list[list[tuple[int, int]]] = []  # per slab, (offset, bytes) in order of offset
        # Threads of the disk tier take and give back too.
        self._lock = threading.Lock()
        self.total_bytes = self.used_bytes = self.peak_bytes = 0

    def restart(self, nbytes: int) -> None:
        """One slab of so many bytes in place of all, of which no piece is in use."""
        with self._lock:
            assert not self.used_bytes, "a piece is in use"
            self._free.clear()
            self.total_bytes = 0
            self._add(nbytes)

    def reserve(self, nbytes: int) -> None:
        """Grow to at least `nbytes` in total, in one slab if there were none."""
        with self._lock:
            if nbytes > self.total_bytes:
                self._add(round_up(nbytes - self.total_bytes))

    def take(self, nbytes: int) -> Piece:
        nbytes = round_up(max(nbytes, 1))
        with self._lock:
            free_piece = self._find(nbytes)
            if free_piece is None:
                self._add(round_up(max(nbytes, self._slab_bytes, self.total_bytes // 4)))
                free_piece = len(self._free) - 1, 0
            slab, hole = free_piece
            # From the front of the hole, so that what is free stays in one piece at its end.
            offset, room = self._free[slab].pop(hole)
            if room > nbytes:
                self._free[slab].insert(hole, (offset + nbytes, room - nbytes))
            self.used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return Piece(slab, offset, nbytes)

    def give(self, piece: Piece) -> None:
        with self._lock:
            holes = self._free[piece.slab]
            offset, room = piece.offset, piece.nbytes
            # Joined with its neighbours at once: otherwise pieces of many sizes would leave holes that nothing fits into.
            position = bisect.bisect(holes, (offset, 0))
            assert position == len(holes) or offset + room <= holes[position][0], "a piece was given back twice"
            if position < len(holes) and offset + room == holes[position][0]:
                room += holes.pop(position)[1]
            if position and sum(holes[position - 1]) == offset:
                before, more = holes.pop(position - 1)
                offset, room, position = before, room + more, position - 1
            holes.insert(position, (offset, room))
            self.used_bytes -= piece.nbytes

    def _find(self, nbytes: int) -> tuple[int, int] | None:
        for slab, holes in enumerate(self._free):
            for index, (_, room) in enumerate(holes):
                if room >= nbytes:
                    return slab, index
        return None

    def _add(self, nbytes: int) -> None:
        self._grow(len(self._free), nbytes)
        self._free.append([(0, nbytes)])
        self.total_bytes += nbytes


class HostSpace:
    """Slabs of host memory and pieces of them as tensors."""

    # [Note: no pinning in a step]
    # The driver may finish what is queued on the device before it pins, also a collective whose other ranks wait for what
    # this rank would queue next: a rank that pins alone, in the middle of a step, could stop all. So `reserve` pins before
    # the first step; what a step adds is not pinned, and a copy to it is slower and the host waits for it, for work that is
    # queued already and whose end needs nobody. After the first step that has used it, `pin` does once for all of it what
    # `reserve` does, when the device has nothing queued. What later steps add stays as it is: ranks with as many rows grow
    # together, but one that grows alone must not stop the others.

    def __init__(self, streams: Streams, *, reserve: int = 0, slab_bytes: int = SLAB_BYTES) -> None:
        self._slabs: list[Tensor] = []
        self._streams = streams
        self._pins = True
        self.pageable_bytes = 0
        self.arena = Arena(self._add, slab_bytes=slab_bytes)
        self.arena.reserve(reserve)
        self._pins = False
        self.is_settled = False

    def view(self, piece: Piece, nbytes: int) -> Tensor:
        """The first `nbytes` of the piece."""
        return self._slabs[piece.slab].narrow(0, piece.offset, nbytes)

    def _add(self, index: int, nbytes: int) -> None:
        self._slabs.append(made_on_host(lambda: self._streams.slab(nbytes, pinned=self._pins)))
        self.pageable_bytes += 0 if self._pins else nbytes

    def pin(self) -> None:
        """Put one pinned slab of their size in place of the slabs, if no piece is in use. The device must be idle."""
        if self.arena.used_bytes:
            return
        self.is_settled = True
        if not self.pageable_bytes:
            return
        total_bytes = self.arena.total_bytes
        self._slabs.clear()
        self.pageable_bytes, self._pins = 0, True
        self.arena.restart(total_bytes)
        self._pins = False


class HostTier:
    """Copies to host memory and back. Only streams wait for copies, the host never does."""

    def __init__(self, streams: Streams, *, reserve: int = 0, slab_bytes: int = SLAB_BYTES) -> None:
        self.streams = streams
        self.space = HostSpace(streams, reserve=reserve, slab_bytes=slab_bytes)
        self.waited_s = 0.0

    def store(self, source: Tensor) -> InHost:
        piece = self.space.arena.take(source.numel())
        host = self.space.view(piece, source.numel())
        return InHost(self, piece, host, self.streams.store(source, host))

    def tidy(self) -> None:
        return None

    def end_step(self) -> None:
        # A step without blocks that are offloaded was no first one.
        if self.space.arena.peak_bytes and not self.space.is_settled:
            self.streams.finish()
            self.space.pin()

    @property
    def peak_bytes(self) -> int:
        return self.space.arena.peak_bytes

    def describe(self) -> str:
        total = f"host memory, {self.space.arena.total_bytes / 2**20:,.1f} MiB taken"
        if self.streams.device.type == "cpu":
            return total
        late = self.space.pageable_bytes
        advice = (
            f", of which {late / 2**20:,.1f} MiB after the first step are not pinned: give reserve={self.peak_bytes}"
        )
        return f"pinned {total}{advice if late else ''}"


class InHost:
    def __init__(self, tier: HostTier, piece: Piece, host: Tensor, left: Event) -> None:
        self._tier, self._piece, self._host, self._left = tier, piece, host, left
        self._coming: Event | None = None

    @property
    def left(self) -> Event:
        return self._left

    def fetch(self, target: Tensor) -> bool:
        streams = self._tier.streams
        # Marked now, after `target` was allocated: kernels queued before may still use a tensor whose memory it reuses.
        self._coming = streams.fetch(self._host, target, (self._left, streams.mark()))
        return True

    def arrive(self) -> None:
        assert self._coming is not None
        self._tier.streams.wait(self._coming)
        self._coming = None

    def release(self) -> None:
        # See [Note: who waits for whom]: the next store into this piece comes after both copies.
        self._tier.space.arena.give(self._piece)
