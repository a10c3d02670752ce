"""Ring of calls (flight recorder): the last calls in which this rank met others, with count, group, bytes, times and place.

A collective counts by its process group; a message by its group, sender and receiver, so that both ends have one count.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType

import torch

from meshkit.core.run_queue import others_starved, starved_s

SIZE = 512  # calls: some ten steps of a small model on two axes
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)
_PYTHON = sysconfig.get_paths()["stdlib"]
_FRAMES = 24  # looked at for the place of a call


class Meeting:
    """Who meets: a process group, or two of its ranks. ranks: of the world; of a message its sender and its receiver."""

    __slots__ = ("count", "is_message", "last", "name", "ranks")

    def __init__(self, name: str, ranks: Sequence[int], *, is_message: bool) -> None:
        self.name, self.ranks, self.is_message = name, tuple(ranks), is_message
        self.count = 0
        self.last: Call | None = None

    @property
    def axis(self) -> str:
        """Of the mesh, for people."""
        return axis_of(self.name)


class Call:
    """A call. count: of its meeting, from 1. size: bytes of the largest tensor. began: it was issued; waited: this rank began
    to wait for it; ended: the wait was over; by time.monotonic(), None where it has not come to that. While
    `starvation_measured`: carriers_starved_s: how long the other threads, which carry it, had no processor until it ended;
    starved_s: this one, while it waited."""

    __slots__ = (
        "_carriers_s",
        "_own_s",
        "began",
        "carriers_starved_s",
        "code",
        "count",
        "ended",
        "instruction",
        "meeting",
        "op",
        "size",
        "starved_s",
        "step",
        "waited",
    )

    def __init__(self, meeting: Meeting, op: str, size: int, step: int | None) -> None:
        meeting.count += 1
        self.meeting, self.count, self.op, self.size, self.step = meeting, meeting.count, op, size, step
        self.waited: float | None = None
        self.ended: float | None = None
        self.starved_s = self.carriers_starved_s = self._own_s = 0.0
        self._carriers_s = None if _carriers is None else _carriers()
        self.code, self.instruction = _place()
        self.began = time.monotonic()
        meeting.last = self  # whole by now: the watch reads it at any time

    def wait(self, since: float | None = None) -> None:
        """From now on this rank waits for it, or since then."""
        if self._carriers_s is not None:
            self._own_s = starved_s()
        self.waited = time.monotonic() if since is None else since

    def end(self) -> None:
        """The wait is over."""
        ended = time.monotonic()
        if self._carriers_s is not None and _carriers is not None:
            self.carriers_starved_s, self.starved_s = _carriers() - self._carriers_s, starved_s() - self._own_s
        self.ended = ended  # last: who reads the ring takes calls with an end

    @property
    def place(self) -> str:
        """Worked out when somebody asks: file, line and function."""
        if self.code is None:
            return ""
        lines = [line for start, end, line in self.code.co_lines() if start <= self.instruction < end and line]
        line = lines[0] if lines else self.code.co_firstlineno
        return f"{Path(self.code.co_filename).name}:{line} in {self.code.co_name}"


class Ring:
    """The last `SIZE` calls of this process. Written by the threads that make them, without a lock: an append is one step."""

    def __init__(self) -> None:
        self.calls: deque[Call] = deque(maxlen=SIZE)
        self.meetings: dict[str, Meeting] = {}
        self.step: int | None = None
        self.paused = False

    def begin(self, meeting: Meeting, op: str, size: int) -> Call:
        call = Call(meeting, op, size, self.step)
        self.calls.append(call)
        return call


ring = Ring()
_carriers: Callable[[], float] | None = (
    None  # how long the other threads have had no processor, where somebody measures
)
_axes: dict[str, str] = {}


def name_group(group_name: str, axis: str) -> None:
    """Let calls on this group be told by the axis of the mesh. A group of several meshes has all its names: tp/dp_shard."""
    known = _axes.get(group_name, "")
    if axis and axis not in known.split("/"):
        _axes[group_name] = f"{known}/{axis}" if known else axis


def axis_of(group_name: str) -> str:
    """ "" for a group of no mesh."""
    return _axes.get(group_name, "")


@contextmanager
def calls_ignored() -> Iterator[None]:
    """Inside nothing is recorded: a world that sends nothing has groups of the same names."""
    before, ring.paused = ring.paused, True
    try:
        yield
    finally:
        ring.paused = before


@contextmanager
def starvation_measured() -> Iterator[None]:
    """Inside, it is known of calls that begin and end for how long they had no processor: a tenth of a millisecond each."""
    global _carriers
    with others_starved() as asked:
        _carriers = asked
        try:
            yield
        finally:
            _carriers = None


_passes_on: dict[CodeType, bool] = {}


def _place() -> tuple[CodeType | None, int]:
    """The innermost frame that is neither torch's nor Python's nor of meshkit.core."""
    # Code and the index of an instruction: a line's number is looked up in a table, some microseconds, when it is asked for.
    # No locals: `f_locals` copies them before Python 3.13, and what it copies lives as long as the frame.
    frame = sys._getframe(3)
    for _ in range(_FRAMES):
        code = frame.f_code
        passes_on = _passes_on.get(code)
        if passes_on is None:
            file = code.co_filename
            passes_on = _passes_on[code] = file.startswith((_TORCH, _OWN, _PYTHON, "<")) or "site-packages" in file
        if not passes_on:
            return code, frame.f_lasti
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None, 0
