"""Who is missing follows from what ranks said last: one that failed, ended, is silent, has finished, or is elsewhere."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from meshkit.faults.heartbeat import Entry, Heartbeat, Left
from meshkit.faults.watchdog import Watchdog

HERE = Entry(
    host=socket.gethostname(), pid=os.getpid(), beat=1, location="step 3, in a", waits=True, since=10.0, now=17.0
)
AWAY = replace(HERE, host="far", pid=1)


class World:
    """Ranks that all write heartbeats but the silent ones. Rank 0 says who is missing."""

    def __init__(self, entries: list[Entry], silent: tuple[int, ...] = ()) -> None:
        store = dist.HashStore()  # type: ignore[attr-defined]
        self.heartbeats = [Heartbeat(store, rank, len(entries)) for rank in range(len(entries))]
        self.heartbeats[0].patience_s = 0.6
        self._entries, self._silent, self._over = entries, silent, threading.Event()
        for heartbeat, entry in zip(self.heartbeats, entries, strict=True):
            heartbeat.write(entry)
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()

    def _beat(self) -> None:
        beat = 1
        while not self._over.wait(0.02):
            beat += 1
            for rank, entry in enumerate(self._entries):
                if rank not in self._silent:
                    self.heartbeats[rank].write(replace(entry, beat=beat))

    def missing(self, *, terminated: bool = False) -> str:
        try:
            return self.heartbeats[0].missing(terminated=terminated)
        finally:
            self._over.set()
            self._thread.join()


@pytest.fixture
def ended() -> Iterator[Entry]:
    with subprocess.Popen(["true"]) as child:
        child.wait()
        yield replace(HERE, pid=child.pid)


def test_rank_0_with_the_store_is_gone_though_its_connection_closes_before_its_process_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel closes the files of a killed process, and some milliseconds later it is gone."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with subprocess.Popen(["sleep", "0.4"]) as ending:
        watchdog = Watchdog.__new__(Watchdog)  # no threads: only what it knows
        watchdog._first_rank, watchdog._answered_at = replace(HERE, pid=ending.pid), time.monotonic()
        assert "has ended without a word" in watchdog._store_is_lost()
        watchdog._first_rank = HERE  # this process lives
        assert "rank 0 on" in (said := watchdog._store_is_lost()) and "does not answer" in said


def test_a_process_that_is_gone_is_told_at_once_on_its_host(ended: Entry) -> None:
    began = time.monotonic()
    world = World([HERE, HERE, ended], silent=(2,))
    world.heartbeats[0].patience_s = 60
    said = world.missing()
    assert said.startswith(f"rank 2 on {HERE.host} has ended without a word")
    assert f"process {ended.pid} is gone. Last seen, a moment before, at step 3, in a." in said
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("told", [False, True])
def test_a_silent_rank_of_another_host_is_told_after_patience_with_that_host(told: bool) -> None:
    said = World([HERE, AWAY, AWAY], silent=(1,)).missing(terminated=told)
    assert said.startswith("rank 1 on far does not answer: process 1 or its host has ended, or the network to it.")
    assert "rank 2" not in said


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([HERE, replace(AWAY, waits=False)], "rank 2 on far lives, and has been for 7 s at step 3, in a."),
        ([HERE, replace(AWAY, left="done")], "rank 2 on far has finished already."),
        ([HERE, replace(AWAY, left="error", error="no")], "rank 2 on far failed at step 3, in a: no"),
        # On this host it was on the screen before the connection closed.
        ([HERE, replace(HERE, left="error", error="no")], ""),
        (
            [replace(AWAY, waits=False, left="lost"), replace(AWAY, waits=False)],
            "rank 2 on far lives, and has been for",
        ),
        ([HERE, AWAY], "Every rank answers, and waits for others: rank 1 on "),
    ],
)
def test_among_ranks_that_answer_it_is_the_one_that_failed_finished_or_does_not_wait(
    others: list[Entry], said: str
) -> None:
    found = World([HERE, *others]).missing()
    assert found.startswith(said) if said else not found
    assert found.count("rank ") == (3 if said.startswith("Every") else bool(said))


@pytest.mark.parametrize("left", ["done", "lost", "terminated"])
def test_a_rank_that_said_how_it_ended_is_not_silent_after_it(left: Left) -> None:
    said = World([HERE, replace(AWAY, left=left), replace(AWAY, waits=False)], silent=(1,)).missing()
    assert said.startswith("rank 1 on far has finished" if left == "done" else "rank 2 on far lives"), said
    assert "does not answer" not in said


def test_ranks_that_are_told_to_end_accuse_nobody_who_answers() -> None:
    assert not World([HERE, replace(HERE, left="terminated"), replace(AWAY, waits=False)]).missing(terminated=True)


def test_of_many_silent_ranks_eight_are_shown() -> None:
    said = World([HERE] + [AWAY] * 20, silent=tuple(range(1, 21))).missing()
    assert said.count("does not answer") == 8
    assert said.endswith("and 12 more ranks.")


def test_the_first_to_ask_is_the_only_one() -> None:
    world = World([HERE, HERE])
    assert [heartbeat.is_first("a") for heartbeat in world.heartbeats] == [True, False]
    assert world.heartbeats[1].is_first("b")
    world.missing()


def test_a_large_world_beats_less_often_and_waits_longer() -> None:
    small, large = Heartbeat(None, 0, 8), Heartbeat(None, 0, 5000)
    assert (small.beat_s, small.patience_s, large.beat_s, large.patience_s) == (1, 5, 10, 50)
