"""A thread beside the training: it tells where this rank is, hears that it is to end, and says whom the others miss."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from meshkit.core import _torch
from meshkit.faults.heartbeat import Entry, Heartbeat, Left
from meshkit.faults.location import Location, location_now

LOOK_S = 0.1  # for a world
HEARD_S = 0.5  # in which the main thread sees a closed connection, and knows more to say
GRACE_S = 20.0  # of the 30 s after which torchrun kills what its SIGTERM did not end
ANSWER_S = 5.0  # that the store may take
T = TypeVar("T")


def report(*lines: str) -> None:
    print("\n" + "\n".join(lines), file=sys.stderr, flush=True)


class Watchdog:
    """Made on the main thread, which may then wait in a collective for ever: the thread does not."""

    def __init__(self, *, stall_s: float) -> None:
        self._stall_s, self._told = stall_s, Location(text="", waits=False)
        self._roll: Heartbeat | None = None
        self._beat = 0
        self._silenced = False  # the store did not take a beat
        self._answered = time.monotonic()  # when the store last took a beat
        self._place, self._since = Location(text="", waits=False), time.monotonic()
        self._telling = threading.Lock()
        self._bell, bell = socket.socketpair()
        self._ring = bell  # kept open
        bell.setblocking(False)
        signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _heard_by_the_thread)
        _Fork()
        _torch.mark_works()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def leave(self, left: Left, place: str = "", error: str = "") -> None:
        """Let the others know how this rank ends."""
        if self._roll is not None:
            _within(ANSWER_S, lambda: self._write(left, place, error))

    def first(self, what: str) -> bool:
        """Whether this rank is the first to say it. Without a world nobody knows: ranks but 0 wait, and speak if they still
        live, for torchrun ends them when rank 0 has failed.
        """
        roll = self._find_world()
        if roll is not None:
            return _within(ANSWER_S, lambda: roll.first(what)) is not False
        if int(os.environ.get("RANK", "0")) > 0:
            time.sleep(3)
        return True

    def tell_who_is_missing(self, error: str, place: str) -> None:
        """Say, once in the world, why this rank ends, and whose fault it is. error, place: what this rank saw of it."""
        consequence = f"{error}\nIt was at {place}."
        self._telling.acquire()  # and the thread will not end this process meanwhile
        roll = self._find_world()
        if roll is None:
            report(consequence)
            return
        answer = _within(ANSWER_S, lambda: self._first_to_end(roll, "lost", place))
        if answer is False:
            self._telling.release()
            time.sleep(
                3 * roll.patience_s
            )  # torchrun ends all ranks as soon as one has: not before the first has spoken
            return
        missing = _within(2 * roll.patience_s + ANSWER_S, roll.missing) if answer else None
        if missing:
            report(consequence, missing)
        elif missing is not None:
            return  # the failed rank has said it on this screen
        elif os.environ.get("LOCAL_RANK", "0") == "0":
            report(consequence, self._store_is_lost())

    def _store_is_lost(self) -> str:
        where = f"{os.environ.get('MASTER_ADDR', 'rank 0')}:{os.environ.get('MASTER_PORT', '')}"
        return (
            f"The store of the job at {where} has not answered for {time.monotonic() - self._answered:.0f} s: that host or "
            f"its torchrun has ended, or the network between it and {socket.gethostname()}."
        )

    def _run(self) -> None:
        while True:
            heard, _, _ = select.select([self._bell], [], [], self._roll.beat_s if self._roll else LOOK_S)
            if heard and signal.SIGTERM in self._bell.recv(64):
                self._end()
            elif not heard and not self._silenced:
                self._tell_place()

    def _tell_place(self) -> None:
        if self._find_world() is None:
            return
        try:
            self._write("")
        except RuntimeError:  # whoever needs the store will say that it is gone; or all is done, and rank 0 had it
            self._silenced = True
            return
        if self._place.waits and self._place != self._told and time.monotonic() - self._since > self._stall_s:
            self._told = self._place
            threading.Thread(target=self._tell_stall, daemon=True).start()  # while this one goes on beating

    def _find_world(self) -> Heartbeat | None:
        if self._roll is not None or not dist.is_initialized() or dist.get_world_size() == 1:
            return self._roll
        if not _torch.is_fake_group(_torch.world()):
            with contextlib.suppress(RuntimeError):
                self._roll = Heartbeat(_torch.world_store().clone(), dist.get_rank(), dist.get_world_size())
        return self._roll

    def _write(self, left: Left, place: str = "", error: str = "") -> None:
        assert self._roll is not None
        now, here = time.monotonic(), location_now()
        if here != self._place:
            self._place, self._since = here, now
        self._beat += 1
        self._roll.write(
            Entry(
                host=socket.gethostname(),
                pid=os.getpid(),
                beat=self._beat,
                place=place or here.text,
                waits=here.waits,
                since=self._since,
                now=now,
                left=left,
                error=error,
            )
        )
        self._answered = now

    def _first_to_end(self, roll: Heartbeat, left: Left, place: str = "") -> bool:
        """Whether no rank has ended before this one for want of others."""
        self._write(left, place)
        return roll.first("missing")

    def _tell_stall(self) -> None:
        roll, here, waited_s = self._roll, self._told.text, time.monotonic() - self._since
        if roll is None:
            return
        with contextlib.suppress(RuntimeError):
            if roll.first(f"stall at {here}"):
                report(
                    f"rank {roll.rank} has waited {waited_s:.0f} s at {here}.", roll.missing() or "Another has failed."
                )

    def _end(self) -> None:
        """SIGTERM has come: from torchrun, which has seen a rank end, or from a user who wants no more."""
        if signal.getsignal(signal.SIGTERM) is not _heard_by_the_thread:  # the recipe saves and leaves, if it can
            timer = threading.Timer(GRACE_S, self._tell_silent)
            timer.daemon = True
            timer.start()
            return
        time.sleep(HEARD_S)
        self._telling.acquire()
        self._tell_silent()
        os._exit(128 + signal.SIGTERM)

    def _tell_silent(self) -> None:
        roll = self._find_world()
        if roll is None:
            return
        first = _within(ANSWER_S, lambda: self._first_to_end(roll, "told"))
        if first and (silent := _within(2 * roll.patience_s, lambda: roll.missing(told=True))):
            report(f"rank {roll.rank} was told to end, at {self._place.text}.", silent)


def _heard_by_the_thread(number: int, frame: FrameType | None) -> None:
    """In place of the default, which would end the process before it has said anything."""


class _Fork:
    """A process forked from this one has no such thread, and its signals are its own, from its first moment on."""

    def __init__(self) -> None:
        self._mask = threading.local()
        os.register_at_fork(before=self._hold, after_in_parent=self._let_go, after_in_child=self._hear_nothing)

    def _hold(self) -> None:
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _let_go(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _hear_nothing(self) -> None:
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is _heard_by_the_thread:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._let_go()


def _within(seconds: float, act: Callable[[], T]) -> T | None:
    """None if it raises, or takes longer: then it is left to itself."""
    results: list[Any] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(act())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
