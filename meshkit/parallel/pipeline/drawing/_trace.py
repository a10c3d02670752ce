"""Chrome traces (chrome://tracing, Perfetto) of pipeline schedules, simulated and measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from meshkit.core.model_state import group_of
from meshkit.parallel.pipeline._record import Measured, times_of
from meshkit.parallel.pipeline._simulate import Simulation, simulate
from meshkit.parallel.pipeline._table import Row, Task
from meshkit.parallel.pipeline.drawing._common import WORDS

if TYPE_CHECKING:
    from meshkit.parallel.pipeline._pipeline import Pipeline


def trace(simulation: Simulation | None = None, measured: Iterable[Measured] = ()) -> str:
    """JSON for chrome://tracing and ui.perfetto.dev: a process per rank, with a lane "simulated" and a lane "measured".

    Names are those of the table (`3B0`), so a search finds both. Each lane starts at 0.
    """
    ranks: set[int] = set()
    events: list[dict[str, Any]] = []
    if simulation is not None:
        for rank, rows in enumerate(simulation.events):
            ranks.add(rank)
            events += [_slice(rank, 0, *event) for event in rows]
            events += [
                {
                    "ph": "C",
                    "name": "activations",
                    "pid": rank,
                    "ts": _microseconds(level.time_s),
                    "args": {"held": level.units},
                }
                for level in simulation.memory[rank]
            ]
    seen = list(measured)
    # Measured times count from a barrier before the step; from its first task on they lie under the simulated ones.
    origin_s = min((start_s for _, _, start_s, _ in seen), default=0.0)
    for rank, what, start_s, end_s in seen:
        ranks.add(rank)
        events.append(_slice(rank, 1, what, start_s - origin_s, end_s - origin_s))
    lanes = [(0, "simulated")] * (simulation is not None) + [(1, "measured")] * bool(seen)
    names: list[dict[str, Any]] = []
    for rank in sorted(ranks):
        names.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        names.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        names += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}} for lane, name in lanes
        ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": names + events})


@contextmanager
def record_trace(pipeline: Pipeline | None, path: str | PathLike[str], *, enabled: bool = True) -> Iterator[None]:
    """Record the step inside; rank 0 of the mesh then writes its pipeline's trace, beside a simulation with the mean times.

    Does nothing without a pipeline, or if not enabled. A collective on the axis.
    """
    if pipeline is None or not enabled:
        yield
        return
    with pipeline.record() as recording:
        yield
    measured = recording.gather()
    # One file for each job: of all pipelines that run side by side, rank 0's is drawn.
    if dist.get_rank(group_of(pipeline.staged.model)) == 0 and recording.schedule is not None:
        simulation = simulate(recording.schedule, times_of(measured, recording.schedule))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(trace(simulation, measured))


# What the trace viewer calls its colours; Perfetto colours by name and ignores them.
TRACE_COLOURS = {
    "F": "thread_state_running",
    "B": "terrible",
    "I": "thread_state_iowait",
    "W": "good",
    "FB": "rail_animation",
}


def _slice(rank: int, lane: int, what: Task | Row, start_s: float, end_s: float) -> dict[str, Any]:
    tasks = what.tasks if isinstance(what, Row) else (what,)
    return {
        "ph": "X",
        "name": str(what),
        "cat": what.op,
        "pid": rank,
        "tid": lane,
        "ts": _microseconds(start_s),
        "dur": _microseconds(end_s - start_s),
        "cname": TRACE_COLOURS[what.op],
        "args": {f"{WORDS[task.op]} of": f"microbatch {task.microbatch} through stage {task.stage}" for task in tasks},
    }


def _microseconds(time_s: float) -> float:
    return round(time_s * 1e6, 3)  # the unit of trace viewers; three digits are nanoseconds
