"""Placement of stages on ranks (loop, wave), and helpers of all schedule generators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._paths import Path
from meshkit.parallel.pipeline._simulate import Times, simulate
from meshkit.parallel.pipeline._table import Op, Row, Schedule, Task


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod ranks: every chunk starts again at rank 0 (Narayanan et al. 2021, section 2.2)."""
    return tuple(stage % ranks for stage in range(chunks * ranks))


def wave(ranks: int, chunks: int) -> tuple[int, ...]:
    """Down and up again: the hop between two chunks stays on a rank. Two chunks are the V of ZBV: s or 2 ranks - 1 - s."""
    down = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (down[::-1] if chunk % 2 else down))


def at_least_one(generator: str, **values: int) -> None:
    """Refuse what is not a whole number of at least 1."""
    for name, value in values.items():
        # True is an int of 1 in Python, but as a count it is a mistake.
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            arguments = ", ".join(f"{name}={value!r}" for name, value in values.items())
            raise PlanError(f"{generator}({arguments}): {name}={value!r} is not a whole number of at least 1.")


def schedule_of(
    name: str,
    microbatches: int,
    placement: Sequence[int],
    tasks: Iterable[Iterable[Task]],
    *,
    paths: tuple[Path, ...] = (),
) -> Schedule:
    """The table of the tasks of every rank, one row each. paths: as those of `Schedule`."""
    rows = tuple(
        tuple(Row(rank, stage, cast(Op, op), microbatch) for op, stage, microbatch in order)
        for rank, order in enumerate(tasks)
    )
    return Schedule(name, microbatches, tuple(placement), rows, paths)


def soonest(*schedules: Schedule, times: Times | None = None) -> Schedule:
    """The schedule that ends first; on a tie the first argument. Without times: F = I = W = 1, B = 2, free hops."""
    return min(schedules, key=lambda schedule: simulate(schedule, times).makespan_s)
