"""Lease of a run's folder (lock file, fencing): one job saves there; that of a job that has ended is taken over.

A lock of the kernel (flock) is not enough: it is not on every network file system, and a forked child keeps that of a killed
parent. Here a file names the holder. On its own machine the process table says whether it lives; elsewhere the holder's
heartbeat does, the time of the last change of the file, by the clock of the file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from meshkit.errors import CheckpointError

LEASE = ".lease"
BEAT_S = 5.0
SILENT_S = 60.0
"""a holder on another machine without a heartbeat for so long has ended"""
TURN_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a folder. machine: one boot of one kernel, and its namespace of pids. started: in ticks since that boot."""

    host: str
    machine: str
    pid: int
    started: int
    since: str
    token: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, which began at {self.since}"

    def is_alive(self) -> bool | None:
        """Whether the process runs; None if it is on another machine."""
        if self.machine != _machine():
            return None
        state, started = _process(self.pid)
        # A zombie runs no more, and another process may have the number by now.
        return state not in "ZX" and started == self.started


class Lease:
    """A lease that this process holds, with its heartbeat in a thread, until `release`."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self.path, self.holder = path, holder
        self.users = 1
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="lease", daemon=True).start()

    def check(self) -> None:
        """Raises: CheckpointError if another job has taken over, which it may once this one was silent for SILENT_S."""
        holder = read_holder(self.path)
        if holder is None or holder.token != self.holder.token:
            who = "nobody now" if holder is None else str(holder)
            raise CheckpointError(
                f"{self.path.parent} is not this job's any more: it is held by {who}. Nothing was saved. This job was silent "
                f"for {SILENT_S:.0f} s, or its lease was deleted: end one of the two jobs."
            )

    def release(self) -> None:
        """Give the folder back, when all that took it in this process have."""
        with _LOCK:
            self.users -= 1
            # A forked child has the object of its parent, and must leave the parent's file.
            if self.users > 0 or self.holder.pid != os.getpid():
                return
            self._ended.set()
            _HELD.pop(self.path, None)
            with contextlib.suppress(OSError), _turn(self.path.parent):
                holder = read_holder(self.path)
                if holder is not None and holder.token == self.holder.token:
                    self.path.unlink()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            # A file system that is away for a while is no reason to end.
            with contextlib.suppress(OSError):
                holder = read_holder(self.path)
                if holder is not None and holder.token == self.holder.token:
                    os.utime(self.path)


_LOCK = threading.RLock()
_HELD: dict[Path, Lease] = {}


def take(folder: Path) -> Lease:
    """The lease of the folder, which is made. One that this process holds already is shared.

    Waits up to SILENT_S for the heartbeat of a holder on another machine.
    Raises: CheckpointError, naming the holder, if another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / LEASE
    with _LOCK:
        held = _HELD.get(path)
        if held is not None and held.holder.pid == os.getpid():
            held.check()
            held.users += 1
            return held
        _HELD[path] = lease = Lease(path, _acquire(path))
        return lease


def read_holder(path: Path) -> Holder | None:
    """The holder; None without a lease. One that cannot be read is somebody on a machine that nobody knows."""
    try:
        return Holder(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return Holder(host="an unknown host", machine="", pid=0, started=0, since="an unknown time", token="")


def _acquire(path: Path) -> Holder:
    own = _own()
    began, first_beat = time.monotonic(), None
    while True:
        with _turn(path.parent):
            holder = read_holder(path)
            alive = False if holder is None else holder.is_alive()
            beat, silent_s = (0.0, 0.0) if alive is not None else _heartbeat(path)
            watched_s = time.monotonic() - began
            if alive is False or (alive is None and max(silent_s, watched_s) >= SILENT_S):
                if holder is not None:
                    logger.warning("%s was held by %s, which has ended: taken over.", path.parent, holder)
                _write(path, own)
                return own
        first_beat = beat if first_beat is None else first_beat
        if alive or beat != first_beat:
            raise CheckpointError(
                f"{path.parent} is held by another job: {holder}. Give this job a folder of its own, or end that one: its "
                f"lease is then taken over, on another machine after {SILENT_S:.0f} s."
            )
        if watched_s < 1:
            logger.warning("%s is held by %s: waiting up to %.0f s for its heartbeat.", path.parent, holder, SILENT_S)
        time.sleep(min(1.0, BEAT_S / 4))


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One process at a time, where the file system has flock; elsewhere the token that was written last wins, see `check`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + TURN_S
        while time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)  # and with it the lock


def _write(path: Path, holder: Holder) -> None:
    partial = path.with_name(f"{LEASE}.{holder.token}")
    partial.write_text(json.dumps(asdict(holder)))
    os.replace(partial, path)  # atomic: nobody reads half of one


def _heartbeat(path: Path) -> tuple[float, float]:
    """(time of the last heartbeat, seconds since then), both by the clock of the file system and not of this machine."""
    probe = path.with_name(f"{LEASE}.{uuid.uuid4().hex}")
    try:
        probe.touch()
        now = probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
    try:
        with path.open("rb") as file:  # opened: NFS then asks its server, and does not answer from memory
            beat = os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return now, 0.0
    return beat, now - beat


def _own() -> Holder:
    _, started = _process(os.getpid())
    booted = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line[:5] == "btime")
    since = datetime.fromtimestamp(booted + started / os.sysconf("SC_CLK_TCK"), UTC)
    return Holder(
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        started=started,
        since=f"{since:%Y-%m-%d %H:%M:%S} UTC",
        token=uuid.uuid4().hex,
    )


@cache
def _machine() -> str:
    # The host's name is not enough: containers share names, and a machine that was started again has other pids.
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _process(pid: int) -> tuple[str, int]:
    """(state, start in ticks since boot); ("X", 0) if there is none of this number."""
    try:
        # The name of a program may hold spaces and parentheses: the fields follow the last one.
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    return words[0], int(words[19])
