"""Which row of a pipeline schedule waits for which: the directed graph that `simulate` finds the longest paths of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._simulate import Times, _hop
from meshkit.parallel.pipeline._table import Schedule, Task, needs, next_stage, output_of


class Dependency(NamedTuple):
    """Row `after` starts no earlier than `hop_s` after row `before` ends; rows are (rank, index)."""

    before: tuple[int, int]
    after: tuple[int, int]
    hop_s: float


def dependencies(schedule: Schedule, times: Times | None = None) -> Iterator[Dependency]:
    """Of every row: on the row before it on its rank, and on those whose outputs it needs.

    Raises: PlanError if a row needs what no row computes.
    """
    times = times or Times()
    hop = _hop(times)
    rank_of = schedule.placement
    made: dict[Task, tuple[int, int]] = {}
    for rank, rows in enumerate(schedule.ranks):
        for index, row in enumerate(rows):
            made.update((output_of(task), (rank, index)) for task in row.tasks)
    for rank, rows in enumerate(schedule.ranks):
        sending_s = 0.0  # with blocking sends, the messages of the row before
        for index, row in enumerate(rows):
            if index:
                yield Dependency((rank, index - 1), (rank, index), sending_s)
            for need in needs(row, schedule):
                if need not in made:
                    raise PlanError(
                        f"schedule {schedule.name!r}: {row} on rank {rank} needs {need}, which no row computes. "
                        "check(schedule) draws the table and says what is wrong with it."
                    )
                if made[need] != (rank, index):
                    yield Dependency(made[need], (rank, index), hop(rank_of[need.stage], rank))
            sending_s = 0.0
            if times.blocking:
                ends = (output_of(task) for task in row.tasks)
                sending_s = sum(hop(rank, rank_of[next_stage(end, schedule)]) for end in ends)
