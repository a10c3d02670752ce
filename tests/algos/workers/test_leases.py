"""Whoever is lost, late, or behind with its weights: each group is learnt once, no token is too old, and nobody is stuck."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.algos.dataflow import Buffer, Groups
from meshkit.algos.workers._leases import Leases

SIZES = (3, 5, 0, 4, 1)
LEASE_S = 10.0


def size(iteration: int) -> int:
    return SIZES[iteration % len(SIZES)]


@given(seed=st.integers(0, 2**32), staleness=st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_each_group_is_taken_once_and_none_too_old(seed: int, staleness: int) -> None:
    draw, total, now = random.Random(seed), 12, 0.0
    buffer = Buffer(Groups(size, total), staleness)
    leases = Leases(buffer, LEASE_S, lambda: now)
    workers: dict[str, int] = {"a": 0, "b": 0}  # with the version of their weights
    held: dict[str, dict[int, int]] = {"a": {}, "b": {}}  # groups, with the version that began them
    written: dict[int, int] = {}  # by group the version of its oldest token
    taken: list[int] = []
    lives = 0
    for step in range(total):
        rounds = 0
        while (chosen := buffer.take(step)) is None:
            rounds += 1
            assert rounds < 400, "all workers ask and nothing becomes ready"
            now += draw.random() * 4
            node = draw.choice([*workers])
            # In the first rounds anything may happen; later workers have the newest weights, ask and write.
            wild = rounds < 100
            if wild and draw.random() < 0.1:  # lost: another one comes in its place
                lives += 1
                del workers[node], held[node]
                workers[f"w{lives}"], held[f"w{lives}"] = draw.randint(0, step), {}
                continue
            if wild and draw.random() < 0.3:
                continue  # not heard of
            workers[node] = step if not wild else draw.randint(workers[node], step)
            for group in leases.renew(node, [*held[node]]):
                if wild and draw.random() < 0.5:
                    del held[node][group]  # it drops what is not its any more, or brings it all the same
            began = leases.assign(node, workers[node], draw.randint(0, 3) if wild else 100)
            held[node] |= dict.fromkeys(began, workers[node])
            for group in [*held[node]]:
                if not wild or draw.random() < 0.3:
                    version = held[node].pop(group)
                    if leases.is_wanted(group):
                        assert version >= leases.oldest[group]
                        leases.finish(group)
                        buffer.ready.add(group)
                        written[group] = version
        assert len(chosen) == size(step) and not set(chosen) & set(taken)
        assert all(step - written[group] <= staleness for group in chosen)
        taken += chosen
    assert sorted(taken) == list(range(sum(map(size, range(total)))))


def test_a_lease_that_ends_is_given_to_another_and_may_still_be_brought_by_the_first() -> None:
    now = 0.0
    leases = Leases(Buffer(Groups(lambda iteration: 4, 9), 1), LEASE_S, lambda: now)
    assert leases.assign("a", 0, 3) == [0, 1, 2]
    now = 9.0
    assert leases.renew("a", [0, 1]) == []  # 2 is forgotten
    assert leases.assign("b", 0, 2) == [2, 3]
    now = 18.0
    assert leases.assign("c", 0, 9) == [4, 5, 6, 7]  # all that weights of version 0 may begin
    now = 20.0
    assert leases.expire() == [0, 1, 2, 3]
    assert leases.assign("c", 0, 1) == [0]
    assert leases.is_wanted(1) and leases.renew("a", [0, 1]) == [0]
    leases.finish(1)
    assert not leases.is_wanted(1) and leases.assign("c", 0, 9) == [2, 3]


def test_who_takes_all_and_writes_nothing_does_not_keep_it() -> None:
    """Others get it after the longest hold, also where the worker drops it and asks again; one that is slow may bring it."""
    for drops in (False, True):
        now, got = 0.0, list[int]()
        leases = Leases(Buffer(Groups(lambda iteration: 4, 9), 1), LEASE_S, lambda: now, most=6, longest=3)  # noqa: B023
        held = leases.assign("hoards", 0, 10**6)
        assert held == [0, 1, 2, 3, 4, 5]  # no more than it may
        assert leases.assign("hoards", 0, 1) == []
        while now < 3 * LEASE_S:
            leases.renew("hoards", [] if drops else held)
            assert leases.assign("hoards", 0, 9) == (held if drops else [])
            leases.renew("writes", got)
            got += leases.assign("writes", 0, 1) if not got else []
            assert not set(got) & set(held)
            now += 0.5 * LEASE_S
        now += 1
        leases.renew("hoards", held)
        assert leases.assign("hoards", 0, 9) == ([7] if got == [6] else [6])[: 6 - len(held) + 1]
        assert leases.assign("writes", 0, 9)[:4] == [0, 1, 2, 3]
        assert leases.is_wanted(5)  # whoever brings it


def test_a_worker_that_is_alone_and_slow_gets_its_group_again() -> None:
    now = 0.0
    leases = Leases(Buffer(Groups(lambda iteration: 1, 9), 1), LEASE_S, lambda: now, longest=2)
    assert leases.assign("slow", 0, 1) == [0]
    others = []
    for _ in range(8):
        now += 0.5 * LEASE_S
        others.append(leases.renew("slow", [0]))
    assert others == [[]] * 4 + [[0]] * 2 + [[]] * 2
    assert leases.open[0].node == "slow" and leases.is_wanted(0)
