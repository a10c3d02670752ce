"""GPipe, 1F1B, interleaved 1F1B (virtual pipeline stages), and the zero-bubble schedules ZB-H1 and ZB-H2."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from meshkit.parallel.pipeline._check import peak_live
from meshkit.parallel.pipeline._table import Schedule, Task

from ._greedy import depth_first, forward_first, list_schedule, unit_costs
from ._placement import at_least_one, loop, schedule_of, soonest


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Bubble rate: (p-1) / (m+p-1). Activations: m microbatches on every rank.
    Source: Huang et al. 2019, GPipe (arXiv 1811.06965).
    """
    at_least_one("gpipe", ranks=ranks, microbatches=microbatches)
    orders = (
        [Task(op, stage, microbatch) for op in "FB" for microbatch in range(microbatches)] for stage in range(ranks)
    )
    return schedule_of("gpipe", microbatches, loop(ranks, 1), orders)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Forwards until the first gradient comes back, then one forward and one backward in turn.

    Bubble rate: (p-1) / (m+p-1), as GPipe. Activations: min(p-i, m) microbatches on rank i.
    Source: Narayanan et al. 2019, PipeDream; 2021, Megatron-LM (arXiv 2104.04473), section 2.2.1, "PipeDream-Flush".
    """
    at_least_one("one_f_one_b", ranks=ranks, microbatches=microbatches)
    # p-1-i forwards ahead, one for each stage behind rank i: fewer would leave one of them idle, more would only take memory.
    orders = (_in_turn(stage, microbatches, ahead=ranks - 1 - stage) for stage in range(ranks))
    return schedule_of("1f1b", microbatches, loop(ranks, 1), orders)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with W behind its I: rank i lags i microbatches, so it holds no more than rank 0 does in 1F1B.

    Bubble: (p-1) (F+I-W) instead of (p-1) (F+I+W), for m >= p. Activations: min(p, m) microbatches on every rank.
    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.2.
    """
    at_least_one("zb_h1", ranks=ranks, microbatches=microbatches)
    orders = (_in_turn(stage, microbatches, ahead=ranks - 1 - stage, lag=stage) for stage in range(ranks))
    return schedule_of("zb-h1", microbatches, loop(ranks, 1), orders)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 with twice the forwards ahead and twice the lag: no rank idles between its first and its last row.

    Bubble: (p-1) (F+I-2W), none if F = I = W, for m >= 2p-1 and each rank counted from its own start, as the paper does;
    the makespan keeps the start, (p-1) F. Activations: 2p-1 microbatches on every rank, with m < 2p-1 max(p, m) at most.
    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.3. Its update without a barrier
    (section 4) is no matter of the table.
    """
    at_least_one("zb_h2", ranks=ranks, microbatches=microbatches)
    live = min(2 * ranks - 1, max(ranks, microbatches))
    orders = []
    for stage in range(ranks):
        ahead = min(2 * (ranks - 1 - stage), live - 1 - stage)
        orders.append(_in_turn(stage, microbatches, ahead=ahead, lag=live - 1 - ahead))
    return schedule_of("zb-h2", microbatches, loop(ranks, 1), orders)


def _in_turn(stage: int, microbatches: int, *, ahead: int, lag: int | None = None) -> Iterator[Task]:
    """`ahead` forwards, then forward and backward in turn. With a lag, W comes that many microbatches after its I."""
    for slot in range(microbatches + ahead):
        if slot < microbatches:
            yield Task("F", stage, slot)
        if (backward := slot - ahead) >= 0:
            yield Task("B" if lag is None else "I", stage, backward)
            if lag is not None and backward >= lag:
                yield Task("W", stage, backward - lag)
    if lag is not None:
        for microbatch in range(max(0, microbatches - lag), microbatches):
            yield Task("W", stage, microbatch)


# Interleaved 1F1B: several chunks per rank, each starting again at rank 0.


def interleaved(ranks: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """1F1B over v = `chunks` stages per rank, which cuts the bubble by v and sends v times as much.

    Bubble rate: (p-1) / (v m + p-1), for m a multiple of p. Otherwise the last round is not full: the schedule is
    that of full rounds without the missing rows, or what greedy list scheduling finds within the same memory, whichever
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
    # A last round that is not full leaves gaps, which greedy scheduling often fills better than the fixed order.
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
    """One rank's tasks in rounds of p microbatches; each round goes through the rank's chunks one after another."""

    def tasks(op: str, order: range) -> list[Task]:
        return [
            Task(op, chunk * ranks + rank, turn * ranks + slot)
            for turn in range(rounds)
            for chunk in order
            for slot in range(ranks)
        ]

    forwards = tasks("F", range(chunks))
    backwards = tasks("B", range(chunks)[::-1])
    # Megatron's warm-up: all chunks but the last once round, and two forwards for each rank behind this one.
    hops_back = ranks - 1 - rank
    ahead = min(len(forwards), hops_back if chunks == 1 else (chunks - 1) * ranks + 2 * hops_back)
    steady = [task for pair in zip(forwards[ahead:], backwards, strict=False) for task in pair]
    return forwards[:ahead] + steady + backwards[len(forwards) - ahead :]
