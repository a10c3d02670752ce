"""Hanayo, the wave pipeline schedule: each microbatch goes down and up the ranks in waves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from math import ceil

from meshkit.parallel.pipeline._table import Schedule

from ._greedy import (
    Plan,
    backward_first,
    depth_first,
    forward_first,
    in_turn,
    list_schedule,
    plan_peak,
    repeat_block,
    unit_costs,
)
from ._placement import at_least_one, schedule_of, soonest, wave

DRAWS = 500  # building blocks tried; more no longer shorten the schedules of 4 and 8 ranks


def hanayo(ranks: int, microbatches: int, *, waves: int = 1) -> Schedule:
    """1F1B over 2w stages per rank, w = `waves`, that go down and up the ranks w times; turning round sends nothing.

    Bubble: about 4 (p-1) of a stage's F, for B = 2 F and m >= p; 1F1B's is 6 w (p-1) in that unit.
    Activations: for m <= p those of 1F1B, p microbatches on a rank; for more at most a quarter more.
    Source: Liu et al. 2023, Hanayo (arXiv 2308.15762), section 3, which has m = p. For more microbatches its order, I before
    F, loses time in every round; so a building block (Qi et al. 2024, arXiv 2405.15362) is searched that fills every rank.
    """
    at_least_one("hanayo", ranks=ranks, microbatches=microbatches, waves=waves)
    placement = wave(ranks, 2 * waves)
    memory = 2 * waves * ranks
    plan = depth_first(placement, microbatches)
    attempts = [(plan, backward_first), (plan, forward_first)]
    if microbatches > ranks:
        block = steady_block(placement, ranks, microbatches)
        attempts += [(block, in_turn), (block, forward_first)]
    return soonest(
        *(
            schedule_of(
                "hanayo",
                microbatches,
                placement,
                list_schedule(
                    placement,
                    microbatches,
                    plan,
                    costs=unit_costs(len(placement)),
                    rule=rule,
                    max_live=[max(memory, *map(plan_peak, plan))] * ranks,
                    split=False,
                ),
            )
            for plan, rule in attempts
        )
    )


def steady_block(placement: tuple[int, ...], ranks: int, microbatches: int) -> Plan:
    """The plan of the best of many random building blocks: least memory, then earliest end. The seed is fixed."""
    return repeat_block(placement, microbatches, _best_block(placement, ranks), 3 * len(placement) // ranks)


@cache
def _best_block(placement: tuple[int, ...], ranks: int) -> dict[tuple[str, int], int]:
    # A generator of its own with a fixed seed: every rank must find the same table, whatever the user has seeded.
    rng = random.Random(0)
    draws = (_block(placement, ranks, rng, skip=(0.0, 0.05, 0.15, 0.3)[draw % 4]) for draw in range(DRAWS))
    return min(draws, key=lambda starts: (_live_slots(starts, placement, ranks), starts["I", 0]))


def _block(placement: Sequence[int], ranks: int, rng: random.Random, *, skip: float) -> dict[tuple[str, int], int]:
    """A random building block: slots of one microbatch's tasks that stay free of its copies a period earlier and later.

    The period of a rank is one cell of three slots per stage, F B B. Ranks differ in where their cells begin. Each task
    takes the first free cell after the one before it, or at times, with probability `skip`, a later one.
    """
    cells = len(placement) // ranks
    begin = [rng.randrange(3) for _ in range(ranks)]
    taken: set[tuple[str, int, int]] = set()
    starts: dict[tuple[str, int], int] = {}
    now = 0
    stages = range(len(placement))
    for op, stage in [("F", stage) for stage in stages] + [("I", stage) for stage in reversed(stages)]:
        # F takes the first slot of its cell and B the other two, so an F and a B may share one.
        rank, slots = placement[stage], 1 if op == "F" else 2
        offset = begin[rank] + slots - 1
        cell = ceil((now - offset) / 3)
        while (op, rank, cell % cells) in taken or rng.random() < skip:
            cell += 1
        taken.add((op, rank, cell % cells))
        starts[op, stage] = 3 * cell + offset
        now = starts[op, stage] + slots
    return starts


def _live_slots(starts: dict[tuple[str, int], int], placement: Sequence[int], ranks: int) -> int:
    """Slots that the activations of one microbatch spend on the rank where they spend most, from F to the end of B."""
    slots = [0] * ranks
    for stage, rank in enumerate(placement):
        slots[rank] += starts["I", stage] + 2 - starts["F", stage]
    return max(slots)
