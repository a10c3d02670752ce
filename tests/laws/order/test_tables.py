"""Every pipeline of the library ends under NCCL's rules, by its table alone, and the order that it had first does not."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import chain, product
from random import Random

import pytest

from meshkit.errors import MeshkitError
from meshkit.parallel.pipeline._channels import Channels, in_rounds, ways_of
from meshkit.parallel.pipeline._check import check
from meshkit.parallel.pipeline._table import Schedule, Task
from meshkit.parallel.pipeline.schedules import NAMES, named, skip_pipe
from meshkit.parallel.pipeline.schedules._placement import schedule_of
from meshkit.preflight.order import EAGER, LAZY, Call, Event, Rules, deadlock, mismatches
from tests.laws.order.tables import Directions, WayChannels, events_of

FIRST = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipe-v", "hanayo")


@cache
def table_of(name: str, ranks: int, microbatches: int) -> Schedule | None:
    """None for numbers that the schedule refuses."""
    try:
        return named(name)(ranks, microbatches)
    except MeshkitError:
        return None


def by_ways(table: Schedule, *, tied: bool, host_waits: bool) -> list[list[Event]]:
    # Those of neighbours when the stages are cut, and those that only this table takes before its first step.
    neighbours = ways_of(table.placement, tied=tied)
    ways = list(chain.from_iterable((*in_rounds(neighbours), *in_rounds(table.ways - neighbours))))

    def opened(rank: int, events: list[Event]) -> Channels:
        channels = WayChannels(rank, events)
        channels.open(ways)
        return channels

    return events_of(table, opened, tied=tied, host_waits=host_waits)


def by_directions(table: Schedule, *, tied: bool = False, host_waits: bool = False) -> list[list[Event]]:
    """Tied gradients cross at the end of each step."""
    return events_of(
        table, lambda rank, events: Directions(rank, table.world, events), tied=tied, host_waits=host_waits
    )


# [Note: the hardest rules]
# Host waits, and communicators for whose first use hosts wait, only add waits where all calls are batched (an unbatched one
# has another communicator by either rule). What ends with both ends without, as the smaller tables show under all four.


def refuse_any_stop(name: str, ranks: int, counts: tuple[int, ...], *, hardest: bool = False) -> int:
    """Returns how many tables there were. hardest: see [Note: the hardest rules]."""
    seen = 0
    for microbatches in counts:
        table = table_of(name, ranks, microbatches)
        for tied, host_waits in product((False, True), (True,) if hardest else (False, True)) if table else ():
            events = by_ways(table, tied=tied, host_waits=host_waits)
            assert not mismatches(events)
            assert all(event.batched for rank in events for event in rank if isinstance(event, Call))
            for rules in (LAZY,) if hardest else (LAZY, EAGER):
                assert not deadlock(events, rules), (name, ranks, microbatches, tied, host_waits, rules.name)
            seen += 1
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_no_pipeline_stops(name: str) -> None:
    assert sum(refuse_any_stop(name, ranks, (1, 2, 5, 8)) for ranks in (2, 3, 4)) > 0


def skipping(ranks: int, microbatches: int) -> Schedule:
    """Paths drawn at random, in any order: each microbatch runs alone, so that the table ends."""
    drawn = Random(f"{ranks} {microbatches}")
    between = range(1, ranks - 1)
    paths = [
        (0, *drawn.sample(between, drawn.randint(0, len(between))), ranks - 1) if ranks > 1 else (0,)
        for _ in range(microbatches)
    ]
    orders = [
        [(op, rank, number) for number, path in enumerate(paths) if rank in path for op in "FB"]
        for rank in range(ranks)
    ]
    tasks = [[Task(*each) for each in order] for order in orders]
    return schedule_of("drawn", microbatches, range(ranks), tasks, paths=tuple(paths))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_no_pipeline_with_skipped_stages_stops(ranks: int) -> None:
    for microbatches in (1, 2, 5, 8):
        for table in (
            skipping(ranks, microbatches),
            skip_pipe(ranks, microbatches, ratio=0.5 * (ranks - 2) / ranks),
            skip_pipe(ranks, microbatches, ratio=(ranks - 2) / ranks / 3, reorder=True),
        ):
            check(table)
            for tied, host_waits in product((False, True), repeat=2):
                events = by_ways(table, tied=tied, host_waits=host_waits)
                assert not mismatches(events)
                for rules in (LAZY, EAGER):
                    assert not deadlock(events, rules), (table, tied, host_waits, rules.name)


@pytest.mark.gate
@pytest.mark.parametrize("name", NAMES)
def test_no_larger_pipeline_stops(name: str) -> None:
    """Some 2,000 tables, of all schedules."""
    assert sum(refuse_any_stop(name, ranks, counts_of(ranks), hardest=True) for ranks in range(2, 17)) > 0


def counts_of(ranks: int) -> tuple[int, ...]:
    """Microbatches: up to 8 on any number of ranks, and so to fewer and more than there are stages; many on few."""
    return (1, 2, 3, 4, 6, 8, *((16,) if ranks <= 8 else ()), *((64,) if ranks in (2, 4) else ()))


def stuck(rules: Rules, *, tied: bool) -> Counter[bool]:
    found: Counter[bool] = Counter()
    for name, ranks, microbatches in product(FIRST, (2, 3, 4, 8), (1, 2, 4, 8, 16)):
        table = table_of(name, ranks, microbatches)
        if table is not None:
            found[bool(deadlock(by_directions(table, tied=tied), rules))] += 1
    return found


@pytest.mark.parametrize(
    ("rules", "tied", "stop"),
    [(LAZY, False, 40), (LAZY, True, 88), (EAGER, False, 7)],
    ids=["lazy", "lazy, tied", "eager"],
)
def test_two_groups_for_all_messages_stop(rules: Rules, tied: bool, stop: int) -> None:
    """One group up and one down, each tensor alone: as many of 200 tables as another simulation found."""
    assert stuck(rules, tied=tied)[True] == stop


def test_the_circle_of_a_pipeline_is_named() -> None:
    table = table_of("1f1b", 4, 4)
    assert table is not None
    found = deadlock(by_directions(table, tied=True), LAZY)
    assert len(found) == 2
    assert "rank 0" in found[0] and "up (0, 3)" in found[0]
    assert "rank 3" in found[1] and "down (0, 3)" in found[1]
