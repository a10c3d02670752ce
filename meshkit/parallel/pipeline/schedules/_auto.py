"""The automatic pipeline schedule: a search for the order that ends soonest under given times and a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Literal

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._check import peak_live
from meshkit.parallel.pipeline._simulate import Simulation, Times, simulate
from meshkit.parallel.pipeline._table import Schedule, Task

from ._costs import costs_of
from ._dualpipe_v import dualpipe_v
from ._exchange import improved
from ._greedy import RULES, Plan, depth_first, list_schedule, plan_peak
from ._hanayo import hanayo, steady_block
from ._one_f_one_b import gpipe, interleaved, one_f_one_b, zb_h1, zb_h2
from ._placement import at_least_one, loop, schedule_of, wave
from ._v import half_block, min_block, v_half, v_min, zbv

PATIENCE = (0.0, 0.5, 1.0)  # of a W's time, for something better to arrive


def auto(
    ranks: int,
    microbatches: int,
    *,
    chunks: int = 1,
    placement: Literal["loop", "wave"] | tuple[int, ...] = "loop",
    times: Times | None = None,
    max_live: int | None = None,
) -> Schedule:
    """The best of a search: never later than any other generator whose placement and memory fit.

    chunks: stages per rank. placement: "loop" as interleaved, "wave" as ZBV and Hanayo, or a tuple with the rank of every
    stage. times: of F, I, W and hops, per stage; by default F = I = W = 1 and free hops. max_live: how
    many (stage, microbatch) pairs a rank may keep activations of, from F to the end of B or W; by default any number.
    Deterministic. Candidates are greedy list schedules from several plans by several rules, with and without W rows, and the
    other generators' tables. The best is then improved by exchanging rows on the critical path, for about a second.
    Raises: PlanError if max_live has no room for one microbatch, or times or placement do not fit.
    Source: the search of Qi et al. 2023 (arXiv 2401.10241), section 3.1; exchanges from van Laarhoven et al. 1992.
    """
    at_least_one("auto", ranks=ranks, microbatches=microbatches, chunks=chunks)
    rank_of = _rank_of_stages(ranks, chunks, placement)
    times = times or Times()
    room = [rank_of.count(rank) for rank in range(ranks)]
    limit = len(rank_of) * microbatches
    if max_live is not None:
        if max_live < max(room):
            raise PlanError(
                f"auto(max_live={max_live}): rank {room.index(max(room))} has {max(room)} stages and must hold a microbatch "
                f"of each. Set max_live to at least {max(room)}, or give the rank fewer stages."
            )
        limit = min(limit, max_live)
    best: tuple[tuple[float, int], Simulation] | None = None
    # A tie in time goes to less memory, then to the earlier candidate: the same table on every machine.
    for schedule in _candidates(ranks, microbatches, rank_of, times, limit):
        simulation = simulate(schedule, times)
        score = simulation.makespan_s, _peak(schedule)
        if score[1] <= limit and (best is None or score < best[0]):
            best = score, simulation
    assert best is not None, "one microbatch after the other fits in any limit"
    return replace(improved(best[1], times, limit).schedule, name="auto")


def _rank_of_stages(ranks: int, chunks: int, placement: str | tuple[int, ...]) -> tuple[int, ...]:
    if placement == "loop":
        return loop(ranks, chunks)
    if placement == "wave":
        return wave(ranks, chunks)
    if isinstance(placement, str):
        raise PlanError(
            f'auto(placement={placement!r}): it is "loop", "wave", or a tuple with the rank of every stage.'
        )
    if not placement or not all(rank in range(ranks) for rank in placement):
        raise PlanError(
            f"auto(placement={placement}): it needs at least one stage, each on a rank from 0 to {ranks - 1}."
        )
    return tuple(placement)


def _candidates(
    ranks: int, microbatches: int, rank_of: tuple[int, ...], times: Times, limit: int
) -> Iterator[Schedule]:
    # This one fits within every limit that `auto` accepts, so there is always a result.
    plan = depth_first(rank_of, microbatches)
    yield _table(microbatches, rank_of, _with_whole_backwards(plan), ranks)
    yield from _published(ranks, microbatches, rank_of)
    plans = [plan]
    if rank_of == wave(ranks, 2):
        plans += [half_block(ranks, microbatches), min_block(ranks, microbatches)]
    if len(rank_of) % (2 * ranks) == 0 and rank_of == wave(ranks, len(rank_of) // ranks):
        plans.append(steady_block(rank_of, ranks, microbatches))
    costs = costs_of(times, len(rank_of))
    for plan, rule, patience in product(plans, RULES, (None, *PATIENCE)):
        if max(map(plan_peak, plan)) > limit:
            continue
        orders = list_schedule(
            rank_of,
            microbatches,
            plan,
            costs=costs,
            rule=rule,
            max_live=[limit] * len(plan),
            split=patience is not None,
            patience=patience or 0.0,
        )
        yield _table(microbatches, rank_of, orders, ranks)


def _published(ranks: int, microbatches: int, rank_of: tuple[int, ...]) -> Iterator[Schedule]:
    """The tables of the other generators that have this placement."""
    generators: list[Callable[[int, int], Schedule]] = []
    if rank_of == loop(ranks, 1):
        generators += [gpipe, one_f_one_b, zb_h1, zb_h2]
    if rank_of == wave(ranks, 2):
        generators += [zbv, v_half, v_min, dualpipe_v]
    for generator in generators:
        yield generator(ranks, microbatches)
    chunks = len(rank_of) // ranks
    if rank_of == loop(ranks, chunks):
        yield interleaved(ranks, microbatches, chunks=chunks)
    if chunks > 0 and chunks % 2 == 0 and rank_of == wave(ranks, chunks):
        yield hanayo(ranks, microbatches, waves=chunks // 2)


def _table(microbatches: int, rank_of: tuple[int, ...], orders: Plan, ranks: int) -> Schedule:
    return schedule_of("auto", microbatches, rank_of, (*orders, *[()] * (ranks - len(orders))))


def _with_whole_backwards(plan: Plan) -> Plan:
    return tuple(tuple(Task("B", *task[1:]) if task.op == "I" else task for task in rank) for rank in plan)


def _peak(schedule: Schedule) -> int:
    return max(peak_live(task for row in rank for task in row.tasks) for rank in schedule.ranks)
