"""The second tier: files on a disk, by way of host memory and a pool of threads (SSDTrain, Wu et al. 2024)."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from torch import Tensor

from meshkit.memory.offload._arena import SLAB_BYTES, Arena, Piece, round_up
from meshkit.memory.offload._files import Files
from meshkit.memory.offload._host import HostSpace
from meshkit.memory.offload._streams import Event, Streams

IO_THREADS = 4  # keeps a fast disk's queue filled; a slow one gains nothing from more


class DiskTier:
    """Bytes go to staging memory, and from there to a file while compute goes on; back the same way.

    staging: host memory for what is on its way out; a store waits while more than that is in flight. A fetch never waits for
    it, so that backward always gets on.
    """

    def __init__(
        self,
        streams: Streams,
        folder: Path | None,
        *,
        staging: int,
        reserve: int = 0,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self.streams, self.staging = streams, staging
        self.files = Files(folder, slab_bytes=slab_bytes)
        self.files.arena.reserve(reserve)
        self.memory = HostSpace(streams, slab_bytes=min(slab_bytes, round_up(staging)))
        self.threads = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="meshkit-offload")
        self.waited_s = 0.0
        self.failure: tuple[int, OSError] | None = None  # the first write that failed: bytes, why
        self._writing: list[OnDisk] = []
        self._leaving: list[OnDisk] = []

    def store(self, source: Tensor) -> OnDisk:
        self.tidy()
        # The host waits, not the device: what is short is memory, and the oldest write is the next to give some back.
        while self.memory.arena.used_bytes + source.numel() > self.staging and self._writing:
            start = time.perf_counter()
            wait([self._writing[0].written])
            self.waited_s += time.perf_counter() - start
            self.tidy()
        stored = OnDisk(self, source)
        self._writing.append(stored)
        return stored

    def retire(self, stored: OnDisk) -> None:
        # Autograd is done with it, but a thread may still write it, or a copy still read it: see `gone`.
        self._leaving.append(stored)
        self.tidy()

    def tidy(self) -> None:
        self._writing = [stored for stored in self._writing if not stored.written.done()]
        self._leaving = [stored for stored in self._leaving if not stored.gone()]
        if self.failure is not None:
            raise self.files.error("writing", *self.failure) from self.failure[1]

    @property
    def peak_bytes(self) -> int:
        return self.files.arena.peak_bytes

    def describe(self) -> str:
        way = "around the page cache (O_DIRECT)" if self.files.direct else "through the page cache (no O_DIRECT here)"
        files, memory = self.files.arena.total_bytes / 2**20, self.memory.arena.total_bytes / 2**20
        return f"{self.files.system} files in {self.files.folder}, {files:,.1f} MiB, {way}, staging {memory:,.1f} MiB"


class OnDisk:
    """What a storage has of staging memory and of a file. Threads write and read; the lock guards who frees the memory."""

    def __init__(self, tier: DiskTier, source: Tensor) -> None:
        self._tier, self._nbytes = tier, source.numel()
        self._piece = tier.files.arena.take(self._nbytes)
        self._out: Piece | None = tier.memory.arena.take(self._nbytes)
        self._left = tier.streams.store(source, tier.memory.view(self._out, self._nbytes))
        self._lock = threading.Lock()
        self._used = False  # a fetch reads the memory on the way out
        self._coming: Future[Event] | Event | None = None
        self._last: Event | None = None  # the last copy to the device from memory that is still held
        self._back: Piece | None = None
        self.written: Future[None] = tier.threads.submit(self._write)

    @property
    def left(self) -> Event:
        return self._left

    def fetch(self, target: Tensor) -> bool:
        streams, ready = self._tier.streams, self._tier.streams.mark()
        with self._lock:
            held, after = (self._out, self._left) if self._out is not None else (self._back, self._last)
            self._used = self._used or self._out is not None
        if held is not None:
            # Store-to-load forwarding. `_used`, set under the lock, keeps the memory from now on, so a write that has not
            # begun need not.
            self.written.cancel()
            assert after is not None
            self._coming = streams.fetch(self._tier.memory.view(held, self._nbytes), target, (after, ready))
            return False
        self._coming = self._tier.threads.submit(self._read, target, ready)
        return True

    def arrive(self) -> None:
        coming, self._coming = self._coming, None
        assert coming is not None
        if isinstance(coming, Future):
            start = time.perf_counter()
            try:
                event = coming.result()
            finally:
                self._tier.waited_s += time.perf_counter() - start
        else:
            event = coming
        self._tier.streams.wait(event)
        self._last = event
        self._free_back()

    def release(self) -> None:
        self.written.cancel()
        self._tier.retire(self)

    def gone(self) -> bool:
        """Gives everything back once nothing reads or writes it."""
        if not self.written.done() or not self._left.query() or not (self._last is None or self._last.query()):
            return False
        memory = self._tier.memory.arena
        for piece in (self._out, self._back):
            if piece is not None:
                memory.give(piece)
        self._out = self._back = None
        self._tier.files.arena.give(self._piece)
        return True

    def _write(self) -> None:
        assert self._out is not None
        try:
            # This thread waits for the copy, the training does not: the file is given what the device has written.
            self._left.synchronize()
            self._tier.files.write(self._piece, self._tier.memory.view(self._out, self._piece.nbytes))
        except OSError as error:
            # A thread's error has no caller: the next `tidy` of the training raises it.
            self._tier.failure = self._tier.failure or (self._piece.nbytes, error)
            return
        with self._lock:
            if not self._used:
                self._tier.memory.arena.give(self._out)
                self._out = None

    def _read(self, target: Tensor, ready: Event) -> Event:
        arena: Arena = self._tier.memory.arena
        self._back = arena.take(self._nbytes)
        try:
            self._tier.files.read(self._piece, self._tier.memory.view(self._back, self._piece.nbytes))
        except OSError as error:
            raise self._tier.files.error("reading", self._piece.nbytes, error) from error
        return self._tier.streams.fetch(self._tier.memory.view(self._back, self._nbytes), target, (ready,))

    def _free_back(self) -> None:
        """The memory that a read went through, if the copy to the device is over; else it is held until `gone`."""
        if self._back is not None and self._last is not None and self._last.query():
            self._tier.memory.arena.give(self._back)
            self._back = None
