"""The meeting place without sockets or clocks: who meets, who waits for how long, and that a meeting counts for all."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.errors import PlanError
from meshkit.optim.outer.place import MeetingRules, PlaceServer
from meshkit.optim.outer.place._messages import Lines, Message, checked, encode
from meshkit.optim.outer.place._place import LATE_S, Place
from tests.depth import draws

HELLO: Message = {"is": "hello", "token": None, "rank": 0, "ranks": 1, "host": "h"}
READY: Message = {"is": "ready", "facts": {"policy": "p"}, "newest": [0, 0], "can_go_back": True}
GRACE_S, EXCHANGE_S, PATIENCE_S, LOOK_S = 10.0, 5.0, 60.0, 0.5


@dataclass
class Rank:
    """A rank that does what it should, in its own time. here_at: since when it waits at a meeting."""

    connection: int
    number: int
    state: str = "new"
    inbox: list[Message | None] = field(default_factory=list)
    here_at: float | None = None
    group: str = ""
    attempt: int = 0
    exchange_until: float | None = None


@dataclass
class Replica:
    """state: of which meetings it is made. steps: how many these are."""

    ranks: list[Rank]
    state: tuple[int, ...] = ()
    counted: int = 0
    """ranks that the last meeting has counted for"""
    alive: bool = True
    mute_until: float = 0.0
    next_at: float = 0.0


class World:
    """Replicas, the place, and a clock, drawn at random. longest_wait_s: of a rank at a meeting."""

    def __init__(self, rules: MeetingRules, ranks: int, seed: int) -> None:
        self.now, self.lines, self.longest_wait_s, self.draw = 0.0, list[str](), 0.0, random.Random(seed)
        self.place, self.ranks = Place(rules, self.lines.append), ranks
        self.replicas: list[Replica] = []
        self.by_connection: dict[int, Rank] = {}
        self.asked: dict[int, set[int]] = {}
        """attempt -> connections; whole: those whose exchange has succeeded"""
        self.whole: dict[int, set[int]] = {}
        self.made: dict[int, tuple[int, ...]] = {}
        """attempt -> the state of those for whom it counts"""
        self.given: dict[str, tuple[int, ...]] = {}
        self.meetings = 0
        self.refusals: list[str] = []

    def come(self) -> None:
        begin = len(self.by_connection)
        replica = Replica([Rank(begin + number, number) for number in range(self.ranks)])
        self.by_connection |= {rank.connection: rank for rank in replica.ranks}
        self.replicas.append(replica)
        self.tell(replica.ranks[0], {**HELLO, "ranks": self.ranks})

    def die(self, replica: Replica) -> None:
        replica.alive = False
        for rank in replica.ranks:
            self.place.lose(rank.connection, self.now)

    def tell(self, rank: Rank, message: Message) -> None:
        if message["is"] == "hello" or rank.connection in self.place._by_connection:  # else it will hear why not
            self.place.hear(rank.connection, checked(message), self.now)

    def turn(self) -> None:
        """Time passes, and all do what they have to."""
        self.now += LOOK_S
        awake = [each for each in self.replicas if each.alive and self.now >= each.mute_until]
        for rank in (rank for replica in awake for rank in replica.ranks if rank.state != "new"):
            self.tell(rank, {"is": "beat"})
        self.place.tick(self.now)
        for connection, message in self.place.outbox:
            self.by_connection[connection].inbox.append(message)
        self.place.outbox.clear()
        for replica in awake:
            for rank in replica.ranks:
                while rank.inbox and replica.alive:
                    message = rank.inbox.pop(0)
                    if message is None:
                        replica.alive = False
                    else:
                        self.hear(replica, rank, message)
                if replica.alive:
                    self.act(replica, rank)

    def hear(self, replica: Replica, rank: Rank, message: Message) -> None:
        word = message["is"]
        if word in ("met", "late", "refused") and rank.here_at is not None:
            self.longest_wait_s = max(self.longest_wait_s, self.now - rank.here_at)
            rank.here_at = rank.exchange_until = None
        if word == "welcome" and rank.number == 0:
            for other in replica.ranks[1:]:
                self.tell(other, {**HELLO, "token": message["token"], "rank": other.number, "ranks": self.ranks})
        if word in ("welcome", "late"):
            self.get_ready(replica, rank)
        elif word == "begin":
            rank.state = "steps"
            self.hand_on(replica, message)
            self.go_on(replica)
        elif word == "join":
            rank.state, rank.group = "joining", message["group"]
        elif word == "giver lost" and rank.state == "joining":
            self.get_ready(replica, rank)
        elif word == "go":
            rank.attempt, rank.exchange_until = message["attempt"], self.now + self.draw.choice([0.0, 1.0, 3.0])
            self.asked.setdefault(rank.attempt, set()).add(rank.connection)
        elif word == "met":
            assert self.whole[rank.attempt] == self.asked[rank.attempt], "it counts, and not all have exchanged"
            rank.state = "steps"
            replica.counted += 1
            if replica.counted == self.ranks:
                replica.counted, replica.state = 0, (*replica.state, rank.attempt)
                self.meetings += 1
                state = self.made.setdefault(rank.attempt, replica.state)
                assert replica.state == state, "replicas that met are made of other meetings"
                self.hand_on(replica, message)
                self.go_on(replica)
        elif word == "refused":
            self.refusals.append(message["why"])

    def get_ready(self, replica: Replica, rank: Rank) -> None:
        rank.state = "ready"
        self.tell(rank, {**READY, "newest": [len(replica.state)] * 2})

    def hand_on(self, replica: Replica, message: Message) -> None:
        mine = self.place._by_connection.get(replica.ranks[0].connection)
        if mine is not None:
            self.given |= {join["group"]: replica.state for join in message["joins"] if join["from"] == mine[0].slot}

    def go_on(self, replica: Replica) -> None:
        replica.next_at = self.now + self.draw.choice([0.0, 1.0, 4.0, 20.0])

    def act(self, replica: Replica, rank: Rank) -> None:
        if all(each.state == "joining" and each.group in self.given for each in replica.ranks):
            replica.state = self.given[rank.group]
            self.go_on(replica)
            for each in replica.ranks:
                each.state = "steps"
                self.tell(each, {"is": "fetched"})
        if rank.state == "steps" and self.now >= replica.next_at and not replica.counted:
            rank.state, rank.here_at = "here", self.now
            self.tell(rank, {"is": "here", "key": f"{len(replica.state)}", "last": True, "finite": True})
        if rank.exchange_until is not None and self.now >= rank.exchange_until:
            rank.exchange_until, fails = None, self.draw.random() < 0.05
            if not fails:
                self.whole.setdefault(rank.attempt, set()).add(rank.connection)
            self.tell(rank, {"is": "done", "attempt": rank.attempt, "why": "broken" * fails})


@given(st.integers(0, 1 << 30), st.integers(1, 2), st.integers(1, 2))
@draws(60)
def test_nobody_waits_longer_than_is_said_and_a_meeting_counts_for_all_or_none(
    seed: int, ranks: int, quorum: int
) -> None:
    rules = MeetingRules(replicas=3, quorum=quorum, grace_s=GRACE_S, exchange_s=EXCHANGE_S, patience_s=PATIENCE_S)
    world = World(rules, ranks, seed)
    for _ in range(3):
        world.come()
    for number in range(600):
        world.turn()
        if number < 500 and world.draw.random() < 0.04:
            alive = [each for each in world.replicas if each.alive]
            what = world.draw.choice(["die", "mute", "come", "come"])
            if what == "come" and len(alive) < 3:
                world.come()
            elif alive and what == "die":
                world.die(world.draw.choice(alive))
            elif alive and what == "mute":
                world.draw.choice(alive).mute_until = world.now + world.draw.choice([2.0, 15.0])
    assert world.meetings >= 3, world.lines
    # Grace for who is missing and for each that falls silent in an exchange; with too few left, patience.
    assert world.longest_wait_s <= PATIENCE_S * (quorum > 1) + 3 * (GRACE_S + EXCHANGE_S + LATE_S), world.lines
    known = ("came within", "do not reach each other", "has its slot", "is gone", "slots are taken")
    assert all(any(text in why for text in known) for why in world.refusals), world.refusals


def members(place: Place, count: int) -> None:
    for index in range(count):
        place.hear(index, HELLO, 0.0)
        place.hear(index, {**READY, "newest": [4, index]}, 0.0)


def sent(place: Place, word: str) -> dict[int, Message]:
    """By connection, since the last call."""
    found = {to: message for to, message in place.outbox if message is not None and message["is"] == word}
    place.outbox.clear()
    return found


def here(place: Place, *replicas: int, now: float, key: str = "step 4", finite: bool = True) -> None:
    for index in replicas:
        place.hear(index, {"is": "here", "key": key, "last": True, "finite": finite}, now)


def test_all_begin_with_the_state_of_the_one_that_is_furthest() -> None:
    place = Place(MeetingRules(replicas=3, quorum=2, grace_s=10), list[str]().append)
    members(place, 2)
    place.tick(9.0)
    assert not sent(place, "begin")  # the third may still come
    place.tick(10.0)
    assert {*sent(place, "begin")} == {1}


def test_the_list_is_closed_when_all_are_there_or_after_the_grace_period() -> None:
    lines = list[str]()
    place = Place(MeetingRules(replicas=3, grace_s=10), lines.append)
    members(place, 3)
    place.outbox.clear()
    here(place, 0, 1, now=5.0)
    place.tick(14.0)
    assert not sent(place, "go")
    for index in range(3):
        place.hear(index, {"is": "beat"}, 14.9)
    place.tick(15.0)
    assert {to: message["slots"] for to, message in sent(place, "go").items()} == {0: [0, 1], 1: [0, 1]}
    assert lines[-1] == "replica 2 on h is left behind: it did not come within 10 s; 2 replicas meet"
    here(place, 2, now=15.5)
    assert {*sent(place, "late")} == {2}


def test_a_meeting_counts_only_when_each_rank_has_its_mean() -> None:
    place = Place(MeetingRules(replicas=3, grace_s=10), list[str]().append)
    members(place, 3)
    place.outbox.clear()
    here(place, 0, 1, 2, now=1.0)
    first = sent(place, "go")
    for index in (0, 1):
        place.hear(index, {"is": "done", "attempt": first[0]["attempt"], "why": ""}, 1.5)
    assert not sent(place, "met")
    place.lose(2, 1.6)
    second = sent(place, "go")
    assert {to: message["slots"] for to, message in second.items()} == {0: [0, 1], 1: [0, 1]}
    assert second[0]["group"] != first[0]["group"]
    for index in (0, 1):
        place.hear(index, {"is": "done", "attempt": first[0]["attempt"], "why": ""}, 1.7)  # of the first, and too late
    assert not sent(place, "met")
    for index in (0, 1):
        place.hear(index, {"is": "done", "attempt": second[0]["attempt"], "why": ""}, 1.8)
    assert {*sent(place, "met")} == {0, 1}
    here(place, 0, 1, now=2.0, key="step 8")
    assert sent(place, "go")[0]["group"] == second[0]["group"]  # the same replicas keep their groups


def test_one_that_meets_at_another_step_is_refused() -> None:
    place = Place(MeetingRules(replicas=2, grace_s=10), list[str]().append)
    members(place, 2)
    place.outbox.clear()
    here(place, 0, now=1.0)
    here(place, 1, now=1.0, key="step 5")
    assert "meets at step 5, and the others at step 4" in sent(place, "refused")[1]["why"]


@pytest.mark.parametrize(
    "given",
    [
        {"replicas": 0},
        {"replicas": 2, "quorum": 3},
        {"replicas": 2, "grace_s": 0.0},
        {"replicas": 1, "quorum": 0},
        {"replicas": 2, "exchange_s": 1e300},
        {"replicas": 2, "patience_s": float("nan")},
    ],
)
def test_settings_that_mean_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="meeting-place --"):
        MeetingRules(**given)


@given(st.lists(st.fixed_dictionaries({"is": st.text(), "x": st.integers()})), st.integers(1, 7))
def test_messages_come_whole_however_they_are_cut(messages: list[Message], size: int) -> None:
    lines, stream = Lines(), b"".join(map(encode, messages))
    found = [each for at in range(0, len(stream), size) for each in lines.feed(stream[at : at + size])]
    assert found == messages


def test_one_out_of_turn_that_is_there_first_does_not_end_the_others() -> None:
    place = Place(MeetingRules(replicas=3, grace_s=10), list[str]().append)
    members(place, 3)
    place.outbox.clear()
    here(place, 2, now=1.0, key="step 3")
    here(place, 0, 1, now=1.0)
    assert {*sent(place, "refused")} == {2}
    place.tick(1.1)
    assert {*sent(place, "go")} == {0, 1}


def test_values_that_are_not_finite_are_given_to_nobody_and_all_go_back_once() -> None:
    lines = list[str]()
    place = Place(MeetingRules(replicas=2, grace_s=10), lines.append)
    members(place, 2)
    place.outbox.clear()
    here(place, 0, 1, now=1.0, finite=False)
    assert {*sent(place, "late")} == {0, 1}
    for index in range(2):
        place.hear(index, {**READY, "newest": [8, 4]}, 2.0)
    began = sent(place, "begin")
    assert len(began) == 1 and all(message["goes_back"] for message in began.values())
    place.hear(1, {"is": "fetched"}, 2.0)
    here(place, 0, 1, now=3.0, key="step 8", finite=False)
    for index in range(2):
        place.hear(index, {**READY, "newest": [12, 8]}, 4.0)
    refused = sent(place, "refused")
    assert {*refused} == {0, 1}
    assert "no replica's values are finite after step 8, again right after they went back" in refused[0]["why"]


def test_without_outer_parameters_values_that_are_not_finite_end_the_run_in_one_line() -> None:
    place = Place(MeetingRules(replicas=1, grace_s=10), list[str]().append)
    members(place, 1)
    here(place, 0, now=1.0, finite=False)
    place.outbox.clear()
    place.hear(0, {**READY, "can_go_back": False}, 2.0)
    assert "their policy keeps no outer parameters" in sent(place, "refused")[0]["why"]


def test_the_healthy_one_gives_also_where_another_is_further() -> None:
    place = Place(MeetingRules(replicas=2, grace_s=10), list[str]().append)
    members(place, 2)
    here(place, 1, now=1.0, finite=False)
    place.hear(1, {**READY, "newest": [9, 9]}, 1.5)
    place.outbox.clear()
    place.lose(0, 2.0)
    place.hear(5, HELLO, 2.5)
    place.hear(5, READY, 2.5)
    began = sent(place, "begin")
    assert {*began} == {5} and not began[5]["goes_back"]


def test_one_that_gets_its_state_from_a_replica_that_falls_silent_is_told_after_the_grace_period() -> None:
    place = Place(MeetingRules(replicas=2, grace_s=10), list[str]().append)
    members(place, 2)
    assert {*sent(place, "join")} == {0}  # from 1, whose state is the newest
    for now in (4.0, 8.0, 12.0):
        place.hear(0, {"is": "beat"}, now)
    assert {*sent(place, "giver lost")} == {0}
    place.hear(0, READY, 12.0)
    place.tick(13.0)
    place.tick(22.0)
    assert {*sent(place, "begin")} == {0}


JUNK = {
    "Infinity": [b'{"is":"hello","ranks":Infinity,"host":"h"}\n'],
    "no fields": [b'{"is":"hello"}\n'],
    "deep": [b"[" * 200_000 + b"\n"],
    "newest": [encode(HELLO), b'{"is":"ready","facts":{},"newest":[Infinity,0],"can_go_back":true}\n'],
    "facts": [encode(HELLO), encode({**READY, "facts": {"policy": "\ud800"}})],
    "host": [encode({**HELLO, "host": "\ud800"})],
    "twice": [encode(HELLO), encode(HELLO)],
    "a rank twice": [encode({**HELLO, "token": "none"})],
    "before hello": [b'{"is":"here","key":"k","last":true,"finite":true}\n'],
    "done": [encode(HELLO), b'{"is":"done","attempt":0,"why":1}\n'],
    "long": [b"x" * (3 << 20)],
    "a word": [b'{"is":"met"}\n'],
}


def hears(connection: socket.socket, lines: Lines, word: str) -> None:
    """With signs of life, until the place has said it."""
    connection.settimeout(0.1)
    end = time.monotonic() + 20
    while True:
        assert time.monotonic() < end, word
        connection.sendall(b'{"is":"beat"}\n')
        with contextlib.suppress(TimeoutError):
            if any(message["is"] == word for message in lines.feed(connection.recv(1 << 16))):
                return


def is_closed(address: tuple[str, int], sends: list[bytes]) -> bool:
    end = time.monotonic() + 5
    with socket.create_connection(address, timeout=5) as bad:
        try:
            for line in sends:
                bad.sendall(line)
            while bad.recv(1 << 16):
                if time.monotonic() > end:
                    return False
        except ConnectionError:
            pass  # it closed with some of ours unread
    return True


def test_junk_ends_the_connection_that_it_came_by_and_nothing_else() -> None:
    server = PlaceServer(MeetingRules(replicas=2, grace_s=1.5), port=0, say=lambda text: None)
    stopped, address, lines = threading.Event(), ("127.0.0.1", server.port), Lines()
    thread = threading.Thread(target=lambda: server.run(until=stopped.is_set), daemon=True)
    thread.start()
    try:
        with socket.create_connection(address, timeout=10) as good:
            good.sendall(encode(HELLO) + encode(READY))
            hears(good, lines, "begin")
            for name, sends in JUNK.items():
                assert is_closed(address, sends) and thread.is_alive(), name
                good.sendall(b'{"is":"beat"}\n')
            with socket.create_connection(address, timeout=10) as other:  # now the place is full
                other.sendall(encode(HELLO))
                hears(other, Lines(), "welcome")
                assert is_closed(address, JUNK["no fields"])
            good.sendall(b'{"is":"here","key":"k","last":true,"finite":true}\n')
            hears(good, lines, "go")
    finally:
        stopped.set()
        thread.join(10)
        server.close()


@pytest.mark.parametrize("port", [-1, 65535, 70000])
def test_ports_that_there_are_not_are_refused(port: int) -> None:
    with pytest.raises(PlanError, match=f"--port {port}: give one from 1 to 65534"):
        PlaceServer(MeetingRules(replicas=1), port=port, say=print)


def test_a_place_goes_on_when_nobody_reads_what_it_prints() -> None:
    read, write = os.pipe()
    command = [sys.executable, "-m", "meshkit", "meeting-place", "--port", "0", "--replicas", "1"]
    place = subprocess.Popen(command, stdout=write)
    os.close(write)
    try:
        with os.fdopen(read) as printed:
            port = int(re.findall(r"port (\d+)", printed.readline())[0])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as one:
            one.sendall(encode(HELLO) + encode(READY))
            hears(one, Lines(), "begin")
            one.sendall(b'{"is":"leave"}\n')
        assert place.wait(20) == 0
    finally:
        place.kill()
        place.wait()


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\r\n", b"[]\n", b'{"a": 1}\n', b"\xff\xfe\n"])
def test_what_is_no_message_is_told(line: bytes) -> None:
    with pytest.raises(ValueError):
        Lines().feed(line)
