"""The disk tier of activation offload: files, through staging memory and a pool of threads (SSDTrain, Wu et al. 2024)."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from torch import Tensor

from meshkit.errors import OffloadError, PlanError
from meshkit.memory.offload._host import PAGE, SLAB_BYTES, Arena, HostSpace, Piece, round_up
from meshkit.memory.offload._streams import Event, Streams

IO_THREADS = 4  # keeps a fast disk's queue filled; a slow one gains nothing from more


class DiskTier:
    """Copies bytes to staging memory and from there to a file, in the background; fetches take the reverse way.

    staging: bytes of host memory for stores under way; a store waits while more are in flight. A fetch never waits for
    staging memory, so backward cannot get stuck.
    """

    def __init__(
        self,
        streams: Streams,
        folder: str | os.PathLike[str] | None,
        *,
        staging: int,
        reserve: int = 0,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self.streams, self.staging = streams, staging
        self.files = Files(folder, slab_bytes=slab_bytes)
        self.files.arena.reserve(reserve)
        # See [Note: no pinning in a step]. Threads copy from it to the device: from pageable memory such a copy may
        # wait for collectives inside of the driver, and hold up those that this rank would queue meanwhile.
        pinned_bytes = 0 if streams.device.type == "cpu" else round_up(staging)
        self.memory = HostSpace(streams, reserve=pinned_bytes, slab_bytes=min(slab_bytes, round_up(staging)))
        self.threads = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="meshkit-offload")
        self.waited_s = 0.0
        self.failure: tuple[int, OSError] | None = None  # the first write that failed: bytes, why
        self._writing: list[OnDisk] = []
        self._leaving: list[OnDisk] = []

    def store(self, source: Tensor) -> OnDisk:
        self.tidy()
        # The host waits and not the device: host memory is short, and the oldest write is the next to free some.
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

    def end_step(self) -> None:
        if self.memory.arena.peak_bytes and not self.memory.is_settled:
            self.streams.finish()
            wait([stored.written for stored in self._writing + self._leaving])
            self.tidy()
            self.memory.pin()

    @property
    def peak_bytes(self) -> int:
        return self.files.arena.peak_bytes

    def describe(self) -> str:
        way = "around the page cache (O_DIRECT)" if self.files.direct else "through the page cache (no O_DIRECT here)"
        files, memory = self.files.arena.total_bytes / 2**20, self.memory.arena.total_bytes / 2**20
        return f"{self.files.system} files in {self.files.folder}, {files:,.1f} MiB, {way}, staging {memory:,.1f} MiB"


class OnDisk:
    """One storage's piece of staging memory and of a file.

    Threads write and read; the lock decides between a fetch and a finished write which of them frees the memory.
    """

    def __init__(self, tier: DiskTier, source: Tensor) -> None:
        self._tier, self._nbytes = tier, source.numel()
        self._piece = tier.files.arena.take(self._nbytes)
        self._out: Piece | None = tier.memory.arena.take(self._nbytes)
        self._left = tier.streams.store(source, tier.memory.view(self._out, self._nbytes))
        self._lock = threading.Lock()
        self._used = False  # a fetch reads the staging memory of the store
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
            piece, after = (self._out, self._left) if self._out is not None else (self._back, self._last)
            self._used = self._used or self._out is not None
        if piece is not None:
            # Store-to-load forwarding: the bytes are still in staging memory. `_used`, set under the lock, keeps that memory,
            # so a write that has not begun is no longer needed.
            self.written.cancel()
            assert after is not None
            self._coming = streams.fetch(self._tier.memory.view(piece, self._nbytes), target, (after, ready))
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
        """Whether nothing reads or writes the pieces any more; frees them then."""
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
        """Free the staging memory of a read if its copy to the device is over; else `gone` frees it later."""
        if self._back is not None and self._last is not None and self._last.query():
            self._tier.memory.arena.give(self._back)
            self._back = None


# Raw files without names, which vanish with the process; O_DIRECT (past the page cache) where the file system allows it.

IN_MEMORY = ("tmpfs", "ramfs")


class Files:
    """Raw files of one rank in `folder`; None is the system's folder for temporary files.

    Each file loses its name as soon as it is open, so that nothing is left of it however the process ends. Its blocks are
    allocated when it is made, so that a full disk shows before anything is written. direct: whether reads and writes go
    around the page cache (O_DIRECT), which a probe finds out; addresses, offsets and lengths are multiples of PAGE.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, *, slab_bytes: int = SLAB_BYTES) -> None:
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.system = file_system(self.folder)
            if folder is None and self.system in IN_MEMORY:
                raise PlanError(
                    f'ActivationOffload(to="disk"): the folder for temporary files, {self.folder}, is a {self.system}, which '
                    "is memory. Give folder= on a disk, or set TMPDIR to one."
                )
            self.direct = _takes_direct(self.folder)
        except OSError as error:
            raise OffloadError(
                f'ActivationOffload(to="disk"): files in {self.folder} cannot be written: {error.strerror}. Give a folder= '
                "that can."
            ) from error
        self._open: list[int] = []
        self.arena = Arena(self._add, slab_bytes=slab_bytes)
        weakref.finalize(self, _close, self._open)

    def write(self, piece: Piece, memory: Tensor) -> None:
        """memory: [piece.nbytes] uint8, page-aligned."""
        # One call moves at most 2 GiB, and less where the disk is full or a signal comes.
        view, done = memory.numpy().data, 0
        while done < piece.nbytes:
            done += os.pwrite(self._open[piece.slab], view[done:], piece.offset + done)

    def read(self, piece: Piece, memory: Tensor) -> None:
        view, done = memory.numpy().data, 0
        while done < piece.nbytes:
            count = os.preadv(self._open[piece.slab], [view[done:]], piece.offset + done)
            if not count:
                raise OSError(None, "the file ends early")
            done += count

    def error(self, doing: str, nbytes: int, cause: OSError) -> OffloadError:
        try:
            space = os.statvfs(self.folder)
            free = f"{space.f_bavail * space.f_frsize:,} bytes"
        except OSError:
            free = "an unknown number of bytes"
        return OffloadError(
            f"activation offload: {doing} {nbytes:,} bytes in {self.folder} failed: {cause.strerror}. {free} are free "
            f"there, and {self.arena.total_bytes:,} are taken by this rank. Give another folder=, more space, or the host."
        )

    def _add(self, index: int, nbytes: int) -> None:
        try:
            descriptor = _open_nameless(self.folder, direct=self.direct)
            try:
                # Blocks on the disk, not a sparse file: a full disk shows here and not in a thread in the middle of a step.
                os.posix_fallocate(descriptor, 0, nbytes)
            except OSError:
                os.close(descriptor)
                raise
        except OSError as error:
            raise self.error("making a file of", nbytes, error) from error
        self._open.append(descriptor)


def file_system(folder: Path) -> str:
    """The type of the file system that holds the folder, as mount prints it; "unknown" where the system does not say."""
    device = folder.stat().st_dev
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return after.split()[0]
    return "unknown"


def _open_nameless(folder: Path, *, direct: bool) -> int:
    descriptor, name = tempfile.mkstemp(prefix="meshkit-offload-", dir=folder)
    try:
        if not direct:
            return descriptor
        os.close(descriptor)
        return os.open(name, os.O_RDWR | os.O_DIRECT)
    finally:
        os.unlink(name)


def _takes_direct(folder: Path) -> bool:
    """Whether a page can be written with O_DIRECT. Raises what also an ordinary write raises."""
    os.close(_open_nameless(folder, direct=False))
    try:
        descriptor = _open_nameless(folder, direct=True)
    except OSError:
        return False
    try:
        # Some file systems open with O_DIRECT and refuse the first write; an anonymous mapping is aligned to pages.
        return os.pwrite(descriptor, mmap.mmap(-1, PAGE), 0) == PAGE
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
