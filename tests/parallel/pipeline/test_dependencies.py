"""The graph of a schedule: its longest paths are the simulator's times, and every edge is one that a row waits for."""

from __future__ import annotations

import pytest

from meshkit.errors import PlanError
from meshkit.parallel.pipeline import Row, Schedule, Times, dependencies, simulate
from meshkit.parallel.pipeline.schedules import NAMES, named


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("blocking", [False, True])
def test_longest_paths_are_the_simulated_times(name: str, blocking: bool) -> None:
    schedule = named(name)(3, 6)
    times = Times(f_s=1.0, i_s=1.3, w_s=0.6, hop_s=lambda a, b: 0.1 + 0.05 * a + 0.02 * b, blocking=blocking)
    told = simulate(schedule, times)
    seconds = {(rank, i): e.end_s - e.start_s for rank, events in enumerate(told.events) for i, e in enumerate(events)}
    edges = list(dependencies(schedule, times))
    starts = dict.fromkeys(seconds, 0.0)
    for _ in range(len(seconds)):  # relaxed until nothing moves, in whatever order
        before = dict(starts)
        for edge in edges:
            starts[edge.after] = max(starts[edge.after], starts[edge.before] + seconds[edge.before] + edge.hop_s)
        if starts == before:
            break
    assert starts == pytest.approx(
        {(r, i): e.start_s for r, events in enumerate(told.events) for i, e in enumerate(events)}
    )


def test_a_need_that_no_row_computes_is_refused() -> None:
    with pytest.raises(PlanError, match="schedule 'mine': 0B0 on rank 0 needs 0F0, which no row computes"):
        list(dependencies(Schedule("mine", 1, (0,), ((Row(0, 0, "B", 0),),))))
