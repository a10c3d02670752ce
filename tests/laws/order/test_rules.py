"""The rules of NCCL, each on the smallest case that keeps or breaks it."""

from __future__ import annotations

import re

import pytest

from meshkit.preflight.order import EAGER, LAZY, Call, Event, Group, HostWait, Part, Rules, Wait, deadlock, mismatches

A, B = Group("a", (0, 1)), Group("b", (0, 1))
ALL = Group("all", (0, 1, 2))


def send(peer: int, group: Group = A, size: int = 8, batched: bool = True) -> Call:
    return Call("p2p", group, parts=(Part("send", peer, size),), batched=batched, where=f"send to {peer}")


def recv(peer: int, group: Group = A, size: int = 8, batched: bool = True) -> Call:
    return Call("p2p", group, parts=(Part("recv", peer, size),), batched=batched, where=f"recv from {peer}")


def both(peer: int, group: Group = A) -> Call:
    return Call("p2p", group, parts=(Part("send", peer, 8), Part("recv", peer, 8)))


def reduce(group: Group, size: int = 4, waited: bool = True, on_host: bool = False) -> Call:
    return Call("all_reduce", group, size, "float32", waited=waited, on_host=on_host, where=f"reduce {group.name}")


CASES: dict[str, tuple[list[list[Event]], bool, bool]] = {
    # name: (events of each rank, stops lazily, stops eagerly)
    "the same calls": ([[reduce(A), reduce(B)], [reduce(A), reduce(B)]], False, False),
    "two groups, waited for in another order": ([[reduce(A), reduce(B)], [reduce(B), reduce(A)]], True, True),
    "two groups, in another order, waited for after both": (
        [
            [reduce(A, waited=False), reduce(B, waited=False), Wait(0), Wait(1)],
            [reduce(B, waited=False), reduce(A, waited=False), Wait(0), Wait(1)],
        ],
        True,  # the hosts wait where the communicators are made
        False,
    ),
    "a rank makes no call": ([[reduce(A)], []], True, True),
    "both send first, on one stream": ([[send(1), recv(1)], [send(0), recv(0)]], True, True),
    "both send and receive in one batch": ([[both(1)], [both(0)]], False, False),
    "both send first, on two groups": (
        [[send(1, A), recv(1, B)], [send(0, B), recv(0, A)]],
        True,  # each host waits for another communicator
        False,
    ),
    "two groups that have been used": (
        [
            [reduce(A), reduce(B), send(1, A), recv(1, B)],
            [reduce(A), reduce(B), send(0, B), recv(0, A)],
        ],
        False,
        False,
    ),
    "alone, each way has another communicator than the group": (
        [
            [reduce(A), send(1, A, batched=False)],
            [reduce(A), recv(0, A, batched=False)],
        ],
        False,
        False,
    ),
    "alone, a pair's communicator is made while another pair waits": (
        [
            [send(1, ALL, batched=False), recv(2, ALL, batched=False)],
            [send(2, ALL, batched=False), recv(0, ALL, batched=False)],
            [send(0, ALL, batched=False), recv(1, ALL, batched=False)],
        ],
        True,
        True,
    ),
    "a host that waits for what it has posted ahead": (
        [
            [reduce(A), reduce(B), recv(1, A), Wait(2), HostWait(), send(1, B)],
            [reduce(A), reduce(B), recv(0, B), Wait(2), HostWait(), send(0, A)],
        ],
        True,
        True,
    ),
    "a host that waits for what will come": (
        [[recv(1, A), Wait(0), HostWait(), send(1, B)], [send(0, A), recv(0, B), Wait(1), HostWait()]],
        False,
        False,
    ),
    "a host that does not wait may be ahead": (
        [[reduce(A, waited=False), HostWait(), reduce(B, on_host=True)], [reduce(B, on_host=True), reduce(A)]],
        True,  # one host makes a communicator, for which the other would have to come from the host's own meeting
        False,
    ),
    "hosts that meet in another order": (
        [[reduce(A, on_host=True), reduce(B, on_host=True)], [reduce(B, on_host=True), reduce(A, on_host=True)]],
        True,
        True,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rules", [LAZY, EAGER], ids=lambda rules: rules.name)
def test_what_stops_under_the_rules(name: str, rules: Rules) -> None:
    ranks, lazy, eager = CASES[name]
    assert bool(deadlock(ranks, rules)) == (lazy if rules is LAZY else eager)


def test_the_circle_names_ranks_and_places() -> None:
    found = deadlock([[send(1), recv(1)], [send(0), recv(0)]], EAGER)
    assert found == [
        "rank 0 stands at send to rank 1 (send to 1)",
        "rank 1 stands at send to rank 0 (send to 0)",
    ]
    found = deadlock([[reduce(A), reduce(B)], [reduce(B), reduce(A)]], LAZY)
    assert found == [
        "rank 0 makes the communicator of a [0, 1] for all_reduce over a [0, 1] (reduce a)",
        "rank 1 makes the communicator of b [0, 1] for all_reduce over b [0, 1] (reduce b)",
    ]


def test_a_rank_outside_of_the_circle_is_left_out() -> None:
    ranks: list[list[Event]] = [[reduce(ALL)], [send(2, ALL), reduce(ALL)], [send(1, ALL), reduce(ALL)]]
    assert [line[:6] for line in deadlock(ranks, EAGER)] == ["rank 1", "rank 2"]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([[reduce(A)], [reduce(A)]], None),
        ([[reduce(A), reduce(B)], [reduce(B), reduce(A)]], None),  # each group's own order is the same
        ([[reduce(A, 4)], [reduce(A, 5)]], "call 0 of rank 0"),
        ([[reduce(A), reduce(A)], [reduce(A)]], "of rank 1 it is None"),
        ([[send(1, size=8)], [recv(0, size=8)]], None),
        ([[send(1, size=8)], [recv(0, size=4)]], r"sends \[8\] bytes to rank 1, which receives \[4\]"),
        ([[send(1)], []], r"which receives \[\]"),
    ],
)
def test_members_that_differ_are_named(ranks: list[list[Event]], words: str | None) -> None:
    found = mismatches(ranks)
    assert len(found) == (words is not None)
    assert words is None or re.search(words, found[0])
