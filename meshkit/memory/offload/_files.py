"""Space in raw files that vanish with the process, written and read around the page cache where the file system can."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from pathlib import Path

from torch import Tensor

from meshkit.errors import OffloadError, PlanError
from meshkit.memory.offload._arena import PAGE, SLAB_BYTES, Arena, Piece

IN_MEMORY = ("tmpfs", "ramfs")


class Files:
    """Raw files of one rank in `folder`; None is the system's folder for temporary files.

    Each file loses its name as soon as it is open, so that nothing is left of it however the process ends. Its blocks are
    allocated when it is made, so that a full disk shows before anything is written. direct: whether reads and writes go
    around the page cache (O_DIRECT), which a probe finds out; addresses, offsets and lengths are multiples of PAGE.
    """

    def __init__(self, folder: Path | None, *, slab_bytes: int = SLAB_BYTES) -> None:
        self.folder = Path(tempfile.gettempdir()) if folder is None else folder
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
