"""Watchdog: a thread beside the training that writes heartbeats, handles SIGTERM, and names the rank the others wait for."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from meshkit.core import _torch
from meshkit.faults.alerts import Alerts, Hook, Kind
from meshkit.faults.calls import CallFiles, last_calls, packed, waits_in
from meshkit.faults.heartbeat import Entry, Heartbeat, Left, failed, is_gone, is_silent
from meshkit.faults.links import Link
from meshkit.faults.location import Location, location_now
from meshkit.faults.page import Page
from meshkit.mesh.agreement import open_difference
from meshkit.mesh.world import store_rank

LOOK_S = 0.1  # between two looks for a process group, before there is one
GONE_S = 2.0  # for a process that has closed its connections to be gone
MAIN_THREAD_S = 0.5  # for the main thread to see a closed connection: it knows more to report
GRACE_S = 20.0  # of the 30 s after which torchrun kills what its SIGTERM did not end
SIGNAL_S = 1.0  # between two looks at whether the store answers
ANSWER_S = 5.0  # for the store to answer
T = TypeVar("T")


_watching: list[Watchdog] = []  # that of this process


def watch_with(
    *,
    alert: Hook | None = None,
    page: str | os.PathLike[str] | None = None,
    calls: str | os.PathLike[str] | None = None,
) -> None:
    """As `run_main(alert=, page=, calls=)`, from now on; what is not given stays. Without run_main nothing happens.

    Raises: PlanError for a hook that cannot be called, or what cannot be written.
    """
    alerts = None if alert is None else Alerts(alert)
    files = None if calls is None else CallFiles(calls)
    for watchdog in _watching:
        watchdog.tell(alerts, None if page is None or int(os.environ.get("RANK", "0")) else Page(page), files)


def send_alert(text: str, kind: Kind = "own") -> None:
    """Hand something of your own to the hook: `if loss > 10: mk.faults.send_alert(...)`. By the rank that calls it; nothing
    is printed, and without a hook nothing happens."""
    for watchdog in _watching:
        watchdog.alert(kind, text)


def show_links(links: Sequence[Link]) -> None:
    """On the status page, where there is one. With each, whether it is slow."""
    for watchdog in _watching:
        watchdog.show_links(links)


def report(*lines: str) -> None:
    print("\n" + "\n".join(lines), file=sys.stderr, flush=True)


class Watchdog:
    """Starts the watchdog thread. Build it on the main thread, which may then wait in a collective without end."""

    # [Note: SIGTERM while the main thread waits] Python runs signal handlers on the main thread, between bytecodes: a rank
    # that waits in a C++ collective would never run one. `signal.set_wakeup_fd` has the C-level handler write the signal
    # number to a socket at once, and the watchdog thread selects on its other end. For this SIGTERM needs a Python handler:
    # one that does nothing, in place of the default, which would end the process before it has reported anything.

    def __init__(
        self,
        *,
        stall_s: float,
        alerts: Alerts | None = None,
        page: Page | None = None,
        calls: CallFiles | None = None,
    ) -> None:
        self._alerts, self._page, self._calls, self._calls_asked = alerts or Alerts(None), page, calls, 0
        self._first_rank: Entry | None = None  # what the rank said last that has the store
        self._speaker: socket.socket | None = None  # open on the one process of a host that reports a lost store
        self._stall_s, self._reported = stall_s, Location(text="", waits=False)
        self._heartbeat: Heartbeat | None = None
        self._beat = 0
        self._store_failed = False  # the store did not take a beat
        self._silence_reported = False
        self._failed = False  # it met what it does not know, and has said so
        self._answered_at = time.monotonic()  # the store, for the last time
        self._location, self._since = Location(text="", waits=False), time.monotonic()
        self._report_lock = threading.Lock()
        self._write_lock, self._has_left = threading.Lock(), False
        # See [Note: SIGTERM while the main thread waits].
        self._signal_reader, signal_writer = socket.socketpair()
        self._signal_writer = signal_writer  # kept open
        signal_writer.setblocking(False)
        signal.set_wakeup_fd(signal_writer.fileno(), warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _handled_by_watchdog_thread)
        _Fork()
        _torch.mark_works()
        _torch.record_calls()
        _watching[:] = [self]
        threading.Thread(target=self._run, name="watch", daemon=True).start()
        threading.Thread(target=self._beat_on, name="heartbeat", daemon=True).start()

    def tell(self, alerts: Alerts | None, page: Page | None, calls: CallFiles | None) -> None:
        """From now on; None leaves it as it is."""
        self._alerts, self._page, self._calls = alerts or self._alerts, page or self._page, calls or self._calls

    def show_links(self, links: Sequence[Link]) -> None:
        if self._page is not None:
            self._page.show_links(links)

    def alert(self, kind: Kind, text: str) -> None:
        self._alerts.send(kind, text, rank=int(os.environ.get("RANK", "0")))

    def report(self, kind: Kind, *lines: str) -> None:
        """On this screen, and to the hook; and every rank writes its calls."""
        report(*lines)
        self.alert(kind, "\n".join(lines))
        if self._calls is not None and (heartbeat := self._heartbeat) is not None and not self._store_failed:
            _within(ANSWER_S, heartbeat.ask_for_calls)

    def finish(self) -> None:
        """Before the process ends: what it has begun to tell others, and its last state on the page."""
        self._write_calls()
        self._alerts.finish()
        if self._page is not None:
            _within(ANSWER_S, self._write_page)
        if self._has_store() and not self._store_failed:
            # The store ends with this process. The others look at its last word once a beat, and know then that all is
            # well, or what has failed.
            time.sleep(2 * self._heartbeat.beat_s if self._heartbeat is not None else 0)

    def _has_store(self) -> bool:
        """Whether the store of the world is in this process."""
        return self._heartbeat is not None and self._heartbeat.rank == store_rank() and not _in_torchrun()

    def _write_calls(self) -> None:
        if self._calls is not None:
            with contextlib.suppress(OSError):  # a full disk stops no training
                self._calls.write(int(os.environ.get("RANK", "0")), self._location.text)

    def leave(self, left: Left, location: str = "", error: str = "") -> None:
        """Write a last heartbeat: how this rank ends. It may be its first, where a rank ends as soon as it has come."""
        if self._find_heartbeat() is not None:
            _within(ANSWER_S, lambda: self._write(left, location, error))

    def is_first(self, question: str) -> bool:
        """Whether this rank is the first to ask, and so should report.

        Without a world there is no store to ask. Then rank 0 reports, and the others wait first: torchrun ends them when rank
        0 has failed, and those that still live report.
        """
        heartbeat = self._find_heartbeat()
        if heartbeat is not None:
            return _within(ANSWER_S, lambda: heartbeat.is_first(question)) is not False
        if int(os.environ.get("RANK", "0")) > 0:
            time.sleep(3)
        return True

    def report_missing(self, error: str, location: str) -> None:
        """Report, once in the world, why this rank ends and which rank is the cause. error, location: of this rank."""
        waited_in = waits_in(last_calls(), int(os.environ.get("RANK", "0")))
        consequence = f"{error}\nIt was at {location}." + (f" It waited in {waited_in}." if waited_in else "")
        self._report_lock.acquire()  # so that the watchdog thread does not end this process meanwhile
        heartbeat = self._find_heartbeat()
        if heartbeat is None:
            self.report("lost", consequence)
            return
        answer = _within(ANSWER_S, lambda: self._first_to_end(heartbeat, "lost", location))
        if answer is False:
            self._report_lock.release()
            time.sleep(
                3 * heartbeat.patience_s
            )  # torchrun ends all ranks as soon as one has: not before the first has spoken
            return
        missing = _within(2 * heartbeat.patience_s + ANSWER_S, heartbeat.missing) if answer else None
        if missing:
            self.report("lost", consequence, missing)
        elif missing is None:  # "": the failed rank has printed it on this screen
            self._report_lost_store("lost", consequence)

    def _report_lost_store(self, kind: Kind, consequence: str) -> None:
        """Once on each host: there is no store by which ranks of other hosts could agree on one."""
        if not self._speaks_for_host():
            time.sleep(MAIN_THREAD_S)  # who ends this job when one rank has ended does not do so before it is said
        elif said := self._store_is_lost():
            self.report(kind, consequence, said)

    def _speaks_for_host(self) -> bool:
        """Whether this is the first process of the job on this host that asks. It stays so until it ends."""
        if self._speaker is None:
            self._speaker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            first = self._first_rank
            # Linux' abstract addresses: of one process at a time, and gone with it. One in each network namespace.
            with contextlib.suppress(OSError):
                self._speaker.bind(f"\0meshkit {_store_address()} {first.pid if first is not None else 0}")
        return bool(self._speaker.getsockname())

    def _store_is_lost(self) -> str:
        """A sentence; "" where the rank that had the store has printed on this host why it ends."""
        first, held = self._first_rank, f"It had the store of the job at {_store_address()}."
        if _in_torchrun() or first is None:
            silent_s = time.monotonic() - self._answered_at
            return (
                f"The store of the job at {_store_address()} has not answered for {silent_s:.0f} s: that host or "
                f"its {'torchrun' if _in_torchrun() else 'rank 0'} has ended, or the network between it and "
                f"{socket.gethostname()}."
            )
        if first.left:  # and has printed why
            said = f"rank {store_rank()} on {first.host} has ended, and said why."
            elsewhere = failed(store_rank(), first) if first.left == "error" else said
            return "" if first.host == socket.gethostname() else elsewhere
        named = is_gone if first.ends_within(GONE_S) else is_silent
        return f"{named(store_rank(), first)} {held}"

    def _run(self) -> None:
        while True:
            readable, _, _ = select.select([self._signal_reader], [], [], SIGNAL_S)
            if readable and signal.SIGTERM in self._signal_reader.recv(64):
                self._end()
            elif not readable and not self._store_failed:
                self._watch_store()

    def _watch_store(self) -> None:
        """A network that is cut closes no connection: the thread that beats waits for the store then, which this one sees."""
        now, heartbeat = time.monotonic(), self._heartbeat
        if heartbeat is None or self._silence_reported or now - self._answered_at < self._stall_s:
            return
        self._silence_reported = True
        waited = (
            f"rank {heartbeat.rank} has had no answer for {now - self._answered_at:.0f} s, at {location_now().text}."
        )
        threading.Thread(target=self._report_lost_store, args=("stall", waited), daemon=True).start()

    def _beat_on(self) -> None:
        # Beside the thread that handles signals: the store may take for ever to answer.
        while not self._store_failed:
            heartbeat = self._heartbeat
            time.sleep(LOOK_S if heartbeat is None or self._knows_too_little(heartbeat) else heartbeat.beat_s)
            try:
                self._beat_and_watch()
            except Exception as error:  # whatever it is: the job goes on without heartbeats
                if not self._failed:
                    report(f"The watchdog of this process failed, and goes on: {type(error).__name__}: {error}.")
                self._failed = True

    def _knows_too_little(self, heartbeat: Heartbeat) -> bool:
        """Whether this rank could not say yet where the rank of the store is, were it gone with it."""
        return heartbeat.rank != store_rank() and self._first_rank is None and not _in_torchrun()

    def _beat_and_watch(self) -> None:
        heartbeat = self._find_heartbeat()
        if heartbeat is None:
            return
        try:
            self._write("")
            if not _in_torchrun() and heartbeat.rank != store_rank():
                self._first_rank = heartbeat.read(store_rank())
            asked = heartbeat.calls_asked()  # an answer: what is written needs none
        except RuntimeError:
            self._store_failed = True
            self._end_without_store()
            return
        self._answered_at = time.monotonic()
        self._silence_reported = False
        if asked != self._calls_asked:
            self._calls_asked = asked
            self._write_calls()
        self._write_page(only_if_due=True)
        if self._location.waits and self._location != self._reported and time.monotonic() - self._since > self._stall_s:
            self._reported = self._location
            threading.Thread(target=self._report_stall, daemon=True).start()  # while this thread goes on beating

    def _end_without_store(self) -> None:
        """Rank 0 has ended, and with it the store: it is named, and this rank ends, which could meet the others no more.

        Under torchrun the store is torchrun's, which ends its ranks by itself.
        """
        first = self._first_rank
        if _in_torchrun() or self._has_left or (first is not None and first.left == "done"):
            return
        time.sleep(MAIN_THREAD_S)
        self._report_lock.acquire()  # for good; a main thread that has it reports, and ends this process
        self._report_lost_store("lost", f"rank {os.environ.get('RANK', '0')} was at {location_now().text}.")
        self._write_calls()
        self._alerts.finish()
        os._exit(1)

    def _write_page(self, *, only_if_due: bool = False) -> None:
        """By the first rank, which has the store, and so is nearest to it."""
        heartbeat, page = self._heartbeat, self._page
        if page is None or heartbeat is None or heartbeat.rank or (only_if_due and not page.is_due()):
            return
        with contextlib.suppress(OSError):  # a full disk stops no training
            page.write(heartbeat.read_all(), patience_s=heartbeat.patience_s)

    def _find_heartbeat(self) -> Heartbeat | None:
        if self._heartbeat is not None or not dist.is_initialized() or dist.get_world_size() == 1:
            return self._heartbeat
        if not _torch.is_fake_group(_torch.world()):
            with contextlib.suppress(RuntimeError):
                # A clone of the store: its own connection, since the main thread may hold the other one in a blocking wait.
                self._heartbeat = Heartbeat(_torch.world_store().clone(), dist.get_rank(), dist.get_world_size())
                self._answered_at = time.monotonic()
        return self._heartbeat

    def _write(self, left: Left, location: str = "", error: str = "") -> None:
        assert self._heartbeat is not None
        now, current = time.monotonic(), location_now()
        if current != self._location:
            self._location, self._since = current, now
        self._beat += 1
        entry = Entry(
            host=socket.gethostname(),
            pid=os.getpid(),
            beat=self._beat,
            location=location or current.text,
            waits=current.waits,
            since=self._since,
            now=now,
            left=left,
            error=error,
            calls=packed(last_calls()),
        )
        with self._write_lock:  # how a rank has ended is its last word, also while it still prints that
            if left or not self._has_left:
                self._has_left |= bool(left)
                self._heartbeat.write(entry)

    def _first_to_end(self, heartbeat: Heartbeat, left: Left, location: str = "") -> bool:
        """Whether this is the first rank that ends because it lost others."""
        self._write(left, location)
        return heartbeat.is_first("missing")

    def _report_stall(self) -> None:
        heartbeat, location, waited_s = self._heartbeat, self._reported.text, time.monotonic() - self._since
        if heartbeat is None:
            return
        with contextlib.suppress(RuntimeError):
            if (difference := open_difference()) and heartbeat.is_first(f"difference {difference}"):
                self.report("stall", f"rank {heartbeat.rank} has waited {waited_s:.0f} s at {location}.", difference)
            elif not difference and heartbeat.is_first(f"stall at {location}"):
                self.report(
                    "stall",
                    f"rank {heartbeat.rank} has waited {waited_s:.0f} s at {location}.",
                    heartbeat.missing() or "Another has failed.",
                )

    def _end(self) -> None:
        """Handle SIGTERM: from torchrun, which has seen a rank end, or from a user."""
        if (
            signal.getsignal(signal.SIGTERM) is not _handled_by_watchdog_thread
        ):  # the recipe handles it: it saves and leaves, if it can
            timer = threading.Timer(GRACE_S, self._report_silent)
            timer.daemon = True
            timer.start()
            return
        time.sleep(MAIN_THREAD_S)
        self._report_lock.acquire()
        self._report_silent()
        self._write_calls()
        self._alerts.finish()
        os._exit(128 + signal.SIGTERM)

    def _report_silent(self) -> None:
        heartbeat = self._find_heartbeat()
        if heartbeat is None:
            return
        first = _within(ANSWER_S, lambda: self._first_to_end(heartbeat, "terminated"))
        if first and (silent := _within(2 * heartbeat.patience_s, lambda: heartbeat.missing(terminated=True))):
            self.report("terminated", f"rank {heartbeat.rank} was told to end, at {self._location.text}.", silent)


def _in_torchrun() -> bool:
    """Whether torchrun has the store of the world, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store_address() -> str:
    return f"{os.environ.get('MASTER_ADDR', 'rank 0')}:{os.environ.get('MASTER_PORT', '')}"


def _handled_by_watchdog_thread(number: int, frame: FrameType | None) -> None:
    """Does nothing. See [Note: SIGTERM while the main thread waits]."""


class _Fork:
    """Gives processes forked from this one their own signals, since they have no watchdog thread.

    SIGTERM is blocked across the fork, so that a child never sees it while the parent's wakeup socket is still set.
    """

    def __init__(self) -> None:
        self._mask = threading.local()
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._forget_signals)

    def _block(self) -> None:
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _forget_signals(self) -> None:
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is _handled_by_watchdog_thread:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._unblock()


def _within(seconds: float, act: Callable[[], T]) -> T | None:
    """The result of `act`; None if it raises, or takes longer. Its thread is then left behind."""
    results: list[Any] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(act())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
