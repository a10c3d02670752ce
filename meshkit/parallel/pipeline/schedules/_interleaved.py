"""Interleaved 1F1B: several chunks per rank, each starting again at rank 0."""

from __future__ import annotations

from math import ceil

from meshkit.parallel.pipeline._check import peak_live
from meshkit.parallel.pipeline._table import Schedule, Task

from ._greedy import depth_first, forward_first, list_schedule, unit_costs
from ._placement import at_least_one, loop, schedule_of, soonest


def interleaved(ranks: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """1F1B over v = `chunks` stages per rank, which cuts the bubble by v and sends v times as much.

    Bubble rate: (p-1) / (v m + p-1), for m a multiple of p. Otherwise the last round is not full: it is run as if it were,
    without the rows that are not there, or in the order greedy list scheduling finds within the same memory, whichever
    ends first for B = 2 F; the bubble is larger.
    Activations: at most (v-1) p + 2 (p-1-i) + 1 of a stage and microbatch on rank i, which is 1 + (p-1) / (p v) times
    1F1B's p v on rank 0.
    Source: Narayanan et al. 2021, Megatron-LM (arXiv 2104.04473), section 2.2.2.
    """
    at_least_one("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks)
    placement = loop(ranks, chunks)
    rounds = ceil(microbatches / ranks)
    full = [_full_rounds(rank, ranks, rounds, chunks) for rank in range(ranks)]
    orders = [[task for task in order if task.microbatch < microbatches] for order in full]
    schedule = schedule_of("interleaved", microbatches, placement, orders)
    if microbatches < ranks or microbatches % ranks == 0:
        return schedule
    greedy = list_schedule(
        placement,
        microbatches,
        depth_first(placement, microbatches),
        costs=unit_costs(len(placement)),
        rule=forward_first,
        max_live=[peak_live(order) for order in full],
        split=False,
    )
    return soonest(schedule, schedule_of("interleaved", microbatches, placement, greedy))


def _full_rounds(rank: int, ranks: int, rounds: int, chunks: int) -> list[Task]:
    """Rounds of p microbatches: a round goes through the chunks of a rank one after another."""

    def tasks(op: str, order: range) -> list[Task]:
        return [
            Task(op, chunk * ranks + rank, turn * ranks + slot)
            for turn in range(rounds)
            for chunk in order
            for slot in range(ranks)
        ]

    forwards = tasks("F", range(chunks))
    backwards = tasks("B", range(chunks)[::-1])
    hops_back = ranks - 1 - rank
    ahead = min(len(forwards), hops_back if chunks == 1 else (chunks - 1) * ranks + 2 * hops_back)
    steady = [task for pair in zip(forwards[ahead:], backwards, strict=False) for task in pair]
    return forwards[:ahead] + steady + backwards[len(forwards) - ahead :]
