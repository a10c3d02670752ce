"""Heartbeat of each rank, in the store of the world, and the rank that keeps the others waiting."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshkit.faults.calls import last_calls, missing_calls, unpacked

Left = Literal["", "done", "error", "lost", "terminated"]
BEAT_S = 1.0
RANKS_AT_A_BEAT = 500  # a larger world beats less often: one store hears all of them
PATIENCE_BEATS = 5  # a rank without a heartbeat for so long has ended, or its host is not reached
SHOWN = 8  # ranks


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A heartbeat of one rank.

    left: how the rank ended: done, by an error of its own, because it lost others, terminated by SIGTERM; "" while it runs.
    since: time.monotonic() on its host when it came to this location. now: when the heartbeat was written.
    waits: for other ranks. calls: the last in each process group, packed, see `faults.calls`.
    """

    host: str
    pid: int
    beat: int
    location: str
    waits: bool
    since: float
    now: float
    left: Left = ""
    error: str = ""
    calls: list[list[Any]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the process is gone. Only ranks on its own host can tell; on others this is False."""
        if self.host != socket.gethostname():
            return False
        try:
            # The name of a program may hold spaces and parentheses: the state follows the last one.
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            # Without /proc, as on macOS, a missing file says nothing.
            return Path("/proc/self/stat").exists()
        return state in "ZX"

    def ends_within(self, seconds: float) -> bool:
        """Whether the process is gone, or is so after some seconds at most. On other hosts there is nothing to wait for."""
        # The kernel closes the connections of a process that was killed before that process is gone: at the reset 24 of 60
        # were still there, on a busy machine for up to 0.12 s.
        until = time.monotonic() + seconds
        while not (ended := self.ended) and self.host == socket.gethostname() and time.monotonic() < until:
            time.sleep(0.02)
        return ended


class Heartbeat:
    """Heartbeats of all ranks. Every method asks the store, and raises or hangs if the host of the store is gone."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self.beat_s = BEAT_S * max(1.0, size / RANKS_AT_A_BEAT)
        self.patience_s = PATIENCE_BEATS * self.beat_s

    def write(self, entry: Entry) -> None:
        self._store.set(f"roll/{self.rank}", json.dumps(asdict(entry)))

    def read(self, rank: int) -> Entry | None:
        key = f"roll/{rank}"
        return Entry(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def is_first(self, question: str) -> bool:
        """True for the first rank that asks this question, so that one rank reports for all."""
        return (
            int(self._store.add(f"roll/first/{hashlib.blake2b(question.encode(), digest_size=8).hexdigest()}", 1)) == 1
        )

    def missing(self, *, terminated: bool = False) -> str:
        """Sentences about the ranks that keep the others waiting: errors at once, silence after `patience_s`.

        "" if such a rank has printed its error on this host already. terminated: ranks are being ended, so only silent ones
        count.
        """
        began = time.monotonic()
        # Two readings: a rank is silent if its beat does not move between them. One reading cannot tell a dead rank
        # from one that is about to write.
        before = self._read_others()
        while True:
            time.sleep(0.2)
            now = self._read_others()
            # An error is told at once: it is the cause, and silence may be its consequence.
            if errors := [rank for rank, entry in now.items() if entry is not None and entry.left == "error"]:
                elsewhere = [rank for rank in errors if (entry := now[rank]) and entry.host != socket.gethostname()]
                return "" if terminated else _lines(now, elsewhere, failed)
            silent = [rank for rank, entry in now.items() if _silent(before[rank], entry)]
            gone = [rank for rank in silent if (entry := now[rank]) is not None and entry.ended]
            if gone:
                return self._with_calls(_lines(now, gone, is_gone), now, gone)
            if not silent:
                return "" if terminated else self._with_calls(_who_keeps_others_waiting(now), now)
            if time.monotonic() - began > self.patience_s:
                return self._with_calls(_lines(now, silent, is_silent), now, silent)

    def _with_calls(self, said: str, entries: dict[int, Entry | None], gone: Iterable[int] = ()) -> str:
        """And the calls in which ranks wait for them."""
        calls = {rank: unpacked(entry.calls) for rank, entry in entries.items() if entry is not None}
        return "\n".join([said, *missing_calls({**calls, self.rank: last_calls()}, gone)])

    def ask_for_calls(self) -> None:
        """Have every rank write its ring of calls into its file."""
        self._store.add("roll/calls", 1)

    def calls_asked(self) -> int:
        """How often that was asked."""
        return int(self._store.add("roll/calls", 0))

    def read_all(self) -> dict[int, Entry | None]:
        return {rank: self.read(rank) for rank in range(self.size)}

    def _read_others(self) -> dict[int, Entry | None]:
        return {rank: self.read(rank) for rank in range(self.size) if rank != self.rank}


def _silent(before: Entry | None, now: Entry | None) -> bool:
    """Whether a rank wrote no heartbeat between two readings."""
    return now is None or (not now.left and before is not None and before.beat == now.beat)


def _who_keeps_others_waiting(entries: dict[int, Entry | None]) -> str:
    """All ranks answer: those that have finished or are busy keep the others waiting."""
    answered = {rank: entry for rank, entry in entries.items() if entry is not None}
    if done := [rank for rank, entry in answered.items() if entry.left == "done"]:
        return _lines(entries, done, lambda rank, entry: f"rank {rank} on {entry.host} has finished already.")
    if busy := [rank for rank, entry in answered.items() if not entry.left and not entry.waits]:
        return _lines(entries, busy, _is_busy)
    return "Every rank answers, and waits for others: " + _lines(entries, answered, _is_busy)


def _lines(entries: dict[int, Entry | None], ranks: Iterable[int], line: Any) -> str:
    ranks = list(ranks)
    texts = [
        f"rank {rank} never said where it is." if (entry := entries[rank]) is None else line(rank, entry)
        for rank in ranks[:SHOWN]
    ]
    return "\n".join(texts + ([f"and {len(ranks) - SHOWN} more ranks."] if len(ranks) > SHOWN else []))


def failed(rank: int, entry: Entry) -> str:
    return f"rank {rank} on {entry.host} failed at {entry.location}: {entry.error}"


def is_gone(rank: int, entry: Entry) -> str:
    return (
        f"rank {rank} on {entry.host} has ended without a word (killed, out of memory, or a crash): process {entry.pid} is "
        f"gone. Last seen, a moment before, at {entry.location}."
    )


def is_silent(rank: int, entry: Entry) -> str:
    return (
        f"rank {rank} on {entry.host} does not answer: process {entry.pid} or its host has ended, or the network to it. "
        f"Last seen at {entry.location}."
    )


def _is_busy(rank: int, entry: Entry) -> str:
    return f"rank {rank} on {entry.host} lives, and has been for {entry.now - entry.since:.0f} s at {entry.location}."
