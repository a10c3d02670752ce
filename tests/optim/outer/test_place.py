"""The meeting place without sockets or clocks: who meets, who waits for how long, and that a meeting counts for all."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.errors import PlanError
from meshkit.optim.outer.place import MeetingRules
from meshkit.optim.outer.place._place import LATE_S, Place
from meshkit.optim.outer.place._rules import Lines, Message, encode
from tests.depth import draws

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
        self.tell(replica.ranks[0], {"is": "hello", "token": None, "rank": 0, "ranks": self.ranks, "host": "h"})

    def die(self, replica: Replica) -> None:
        replica.alive = False
        for rank in replica.ranks:
            self.place.lose(rank.connection, self.now)

    def tell(self, rank: Rank, message: Message) -> None:
        if message["is"] == "hello" or rank.connection in self.place._by_connection:  # else it will hear why not
            self.place.hear(rank.connection, message, self.now)

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
                self.tell(other, {"is": "hello", "token": message["token"], "rank": other.number})
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
        self.tell(rank, {"is": "ready", "facts": {"policy": "p"}, "newest": [len(replica.state)] * 2})

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
        place.hear(index, {"is": "hello", "token": None, "rank": 0, "ranks": 1, "host": "h"}, 0.0)
        place.hear(index, {"is": "ready", "facts": {"policy": "p"}, "newest": [4, index]}, 0.0)


def sent(place: Place, word: str) -> dict[int, Message]:
    """By connection, since the last call."""
    found = {to: message for to, message in place.outbox if message is not None and message["is"] == word}
    place.outbox.clear()
    return found


def here(place: Place, *replicas: int, now: float, key: str = "step 4") -> None:
    for index in replicas:
        place.hear(index, {"is": "here", "key": key, "last": True, "finite": True}, now)


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
    [{"replicas": 0}, {"replicas": 2, "quorum": 3}, {"replicas": 2, "grace_s": 0.0}, {"replicas": 1, "quorum": 0}],
)
def test_settings_that_mean_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="meeting-place --"):
        MeetingRules(**given)


@given(st.lists(st.fixed_dictionaries({"is": st.text(), "x": st.integers()})), st.integers(1, 7))
def test_messages_come_whole_however_they_are_cut(messages: list[Message], size: int) -> None:
    lines, stream = Lines(), b"".join(map(encode, messages))
    found = [each for at in range(0, len(stream), size) for each in lines.feed(stream[at : at + size])]
    assert found == messages


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\r\n", b"[]\n", b'{"a": 1}\n', b"\xff\xfe\n"])
def test_what_is_no_message_is_told(line: bytes) -> None:
    with pytest.raises(ValueError):
        Lines().feed(line)
