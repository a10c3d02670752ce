"""Improving a pipeline schedule by exchanges of neighbours on its critical path (van Laarhoven et al. 1992)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._check import peak_live
from meshkit.parallel.pipeline._simulate import Simulation, Times, simulate
from meshkit.parallel.pipeline._table import Schedule, Task, needs

from ._greedy import EPSILON

VISITS = 150_000  # rows simulated: about a second


def improved(simulation: Simulation, times: Times, limit: int) -> Simulation:
    """Exchange neighbours on the critical path while that ends the schedule sooner; no other exchange can.

    limit: how many (stage, microbatch) pairs a rank may keep activations of.
    """
    visits = VISITS
    sooner = True
    while sooner:
        sooner = False
        schedule = simulation.schedule
        # The first exchange that helps is taken, and the critical path is computed anew.
        for rank, index in _exchanges(simulation):
            rows = list(schedule.ranks[rank])
            rows[index], rows[index + 1] = rows[index + 1], rows[index]
            ranks = (*schedule.ranks[:rank], tuple(rows), *schedule.ranks[rank + 1 :])
            if (visits := visits - sum(map(len, ranks))) < 0:
                return simulation
            if peak_live(task for row in rows for task in row.tasks) > limit:
                continue
            try:
                other = simulate(replace(schedule, ranks=ranks), times)
            except PlanError:  # after the exchange, ranks wait for one another
                continue
            if other.makespan_s < simulation.makespan_s:
                simulation, sooner = other, True
                break
    return simulation


def _exchanges(simulation: Simulation) -> Iterator[tuple[int, int]]:
    """Neighbours on the critical path that may change places, the last first: (rank, index of the first of the two)."""
    schedule, events = simulation.schedule, simulation.events
    cell_of = {
        task._replace(op="I") if task.op == "B" else task: (rank, index)
        for rank, rows in enumerate(schedule.ranks)
        for index, row in enumerate(rows)
        for task in row.tasks
    }
    # From the row that ends last backwards, each time to what the row started right after: the row before it on its rank, or
    # else the input that came last.
    rank = max(range(schedule.world), key=lambda rank: events[rank][-1].end_s if events[rank] else 0.0)
    index = len(events[rank]) - 1
    while index >= 0:
        row, start_s, _ = events[rank][index]
        if index and events[rank][index - 1].end_s >= start_s - EPSILON * simulation.makespan_s:
            before = events[rank][index - 1].row
            if not any(_in_order(first, second, schedule) for first, second in product(before.tasks, row.tasks)):
                yield rank, index - 1
            index -= 1
            continue
        sources = [cell_of[need] for need in needs(row, schedule)]
        if not sources:
            return
        rank, index = max(sources, key=lambda at: events[at[0]][at[1]].end_s)


def _in_order(first: Task, second: Task, schedule: Schedule) -> bool:
    """Whether the two must keep their order: ops of one microbatch in a stage, or one op of its successive microbatches."""
    if first.stage != second.stage:
        return False
    # Two microbatches of one op in one stage take the same time, so where both go on to the same stages exchanging them gains
    # nothing.
    alike = schedule.paths[first.microbatch] == schedule.paths[second.microbatch]
    return first.microbatch == second.microbatch or (first.op == second.op and alike)
