"""A frequency plan for a pipeline schedule: the clock of every row, its joules, and the time-energy front."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import accumulate, chain, groupby, pairwise
from math import inf
from pathlib import Path

from meshkit.errors import PlanError
from meshkit.parallel.pipeline import Schedule, Simulation, Times, dependencies, simulate
from meshkit.preflight._format import table_lines
from meshkit.preflight.energy._power import Choice, Power, PowerPoint, choices, convex, refuse_points
from meshkit.preflight.energy._program import Edge, Solved, solve

TOL_SECONDS = 1e-7  # of a step, what the solver is off


@dataclass(frozen=True, kw_only=True)
class EnergyPlan:
    """A clock for every row of a schedule. Joules are of one step and all devices; `str()` is the printed form.

    full, planned: the step in time at the full clock, and with the plan. points: of each rank's rows, in the order of the
    table. full_joules: at the full clock. least_joules: the linear program's, in which a row may mix two clocks; joules: of
    the plan, one clock a row.
    """

    full: Simulation
    planned: Simulation
    points: tuple[tuple[PowerPoint, ...], ...] = field(repr=False)
    step_s: float
    full_joules: float
    joules: float
    least_joules: float

    @property
    def saved(self) -> float:
        """Share of the joules at full clock."""
        return 1 - self.joules / self.full_joules if self.full_joules else 0.0

    @property
    def slowdown(self) -> float:
        """Of the step: 0.01 is 1 % longer."""
        return self.step_s / self.full.makespan_s - 1 if self.full.makespan_s else 0.0

    def __str__(self) -> str:
        rows = [("", "step", "joules", "watts, mean", "")]
        for name, step_s, joules, note in (
            ("full clock", self.full.makespan_s, self.full_joules, ""),
            ("plan", self.step_s, self.joules, f"{self.saved:.2%} saved, {self.slowdown:.2%} slower"),
            ("least", self.step_s, self.least_joules, "where rows may mix clocks"),
        ):
            watts = f"{joules / step_s:.4g}" if step_s else ""
            rows.append((name, f"{step_s:.6g} s", f"{joules:.6g}", watts, note))
        return "\n".join([*table_lines(rows, right=(1, 2, 3)), "", *_clocks(self)])


def plan_energy(
    schedule: Schedule,
    times: Times | None = None,
    *,
    power: Power,
    idle_watts: float,
    slowdown: float = 0.0,
    devices: int = 1,
) -> EnergyPlan:
    """Lower the clock of rows that have slack, so that a step of (1 + slowdown) times its shortest takes the fewest joules.

    times: at the full clock. idle_watts: of a device that waits for its pipeline. devices: of each rank of pp, all alike
    (tp, dp and so on). The linear program's seconds are rounded to the next faster point; then rows that still have slack
    for a slower one get it, those that save most per second first.
    Raises: PlanError for points that are none, for a negative slowdown, and without scipy.
    """
    if not 0 <= slowdown < inf:
        raise PlanError(f"slowdown={slowdown:g}: give a share from 0 up, 0.01 for 1 % longer.")
    task = _Task.read(schedule, times, power, idle_watts, devices)
    return task.plan(task.full.makespan_s * (1 + slowdown))


def front(
    schedule: Schedule,
    times: Times | None = None,
    *,
    power: Power,
    idle_watts: float,
    devices: int = 1,
    count: int = 9,
) -> tuple[EnergyPlan, ...]:
    """The time-energy front: plans from no slowdown to the step that costs the fewest joules, evenly spaced in time."""
    task = _Task.read(schedule, times, power, idle_watts, devices)
    shortest_s = task.full.makespan_s
    # No step is longer than all rows at their slowest, one after the other.
    longest_s = sum(kept[-1].seconds for kept in task.hulls) + sum(edge.hop_s for edge in task.edges) + shortest_s
    end_s = solve(task.hulls, task.edges, step_s=longest_s, waiting_watts=idle_watts * schedule.world).step_s
    if end_s - shortest_s <= TOL_SECONDS * shortest_s or count < 2:
        return (task.plan(shortest_s),)
    gap_s = (end_s - shortest_s) / (count - 1)
    return tuple(task.plan(shortest_s + index * gap_s) for index in range(count))


def write_csv(plan: EnergyPlan, path: str | os.PathLike[str]) -> None:
    """The frequency plan, a line for each row: rank and row of the table, what it computes, MHz, and when."""
    path = Path(path)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["rank", "row", "task", "mhz", "start_s", "end_s"])
        for rank, (events, points) in enumerate(zip(plan.planned.events, plan.points, strict=True)):
            for index, (event, point) in enumerate(zip(events, points, strict=True)):
                writer.writerow(
                    [rank, index, event.row, f"{point.mhz:g}", f"{event.start_s:.9g}", f"{event.end_s:.9g}"]
                )


@dataclass(frozen=True, kw_only=True)
class _Task:
    """Rows of all ranks, numbered through; edges in an order in which no row comes before what it waits for."""

    full: Simulation
    choices: list[list[Choice]]
    hulls: list[list[Choice]]
    edges: list[Edge]
    idle_watts: float
    devices: int

    @staticmethod
    def read(schedule: Schedule, times: Times | None, power: Power, idle_watts: float, devices: int) -> _Task:
        if devices < 1:
            raise PlanError(f"devices={devices}: a rank of pp has at least one.")
        full = simulate(schedule, times)
        first = [0]
        for rank in schedule.ranks:
            first.append(first[-1] + len(rank))
        found = []
        for row, start_s, end_s in chain(*full.events):
            points = power(row) if callable(power) else power
            refuse_points(points, idle_watts)
            found.append(choices(points, end_s - start_s, idle_watts))
        edges = [
            Edge(first[before[0]] + before[1], first[after[0]] + after[1], hop_s)
            for before, after, hop_s in dependencies(schedule, times)
        ]
        waits: dict[int, list[int]] = {}
        for edge in edges:
            waits.setdefault(edge.after, []).append(edge.before)
        place = {row: index for index, row in enumerate(TopologicalSorter(waits).static_order())}
        edges.sort(key=lambda edge: place[edge.after])
        return _Task(
            full=full,
            choices=found,
            hulls=[convex(kept) for kept in found],
            edges=edges,
            idle_watts=idle_watts,
            devices=devices,
        )

    def plan(self, step_s: float) -> EnergyPlan:
        # Rounding in the solver must not make the shortest step impossible.
        solved = solve(self.hulls, self.edges, step_s=step_s * (1 + TOL_SECONDS))
        picked = self._rounded(solved, step_s)
        starts, ends = self._in_time(picked)
        joules = sum(kept[index].joules for kept, index in zip(self.choices, picked, strict=True))
        bounds = [0, *accumulate(map(len, self.full.schedule.ranks))]
        ranks = [range(*pair) for pair in pairwise(bounds)]
        points = [tuple(self.choices[i][picked[i]].point for i in rows) for rows in ranks]
        full_joules = sum(kept[0].joules for kept in self.choices)
        return EnergyPlan(
            full=self.full,
            planned=Simulation(
                self.full.schedule,
                self.full.times,
                tuple(tuple(starts[i] for i in rows) for rows in ranks),
                tuple(tuple(ends[i] for i in rows) for rows in ranks),
            ),
            points=tuple(points),
            step_s=step_s,
            full_joules=self._all(full_joules, self.full.makespan_s),
            joules=self._all(joules, step_s),
            least_joules=self._all(solved.joules, step_s),
        )

    def _all(self, joules: float, step_s: float) -> float:
        """With those of waiting, on all devices."""
        return self.devices * (joules + self.idle_watts * step_s * self.full.schedule.world)

    def _rounded(self, solved: Solved, step_s: float) -> list[int]:
        """Of each row, which of its choices."""
        allowed_s = TOL_SECONDS * step_s
        picked = [
            max(index for index, choice in enumerate(kept) if index == 0 or choice.seconds <= seconds + allowed_s)
            for kept, seconds in zip(self.choices, solved.seconds, strict=True)
        ]
        while True:
            slack = self._slack(picked, step_s)
            best, gain = None, 0.0
            for row, kept in enumerate(self.choices):
                for index in range(picked[row] + 1, len(kept)):
                    more_s = kept[index].seconds - kept[picked[row]].seconds
                    per_s = (kept[picked[row]].joules - kept[index].joules) / more_s if more_s else inf
                    if more_s <= slack[row] + allowed_s / 2 and per_s > gain:
                        best, gain = (row, index), per_s
            if best is None:
                return picked
            picked[best[0]] = best[1]

    def _seconds(self, picked: Sequence[int]) -> list[float]:
        return [kept[index].seconds for kept, index in zip(self.choices, picked, strict=True)]

    def _in_time(self, picked: Sequence[int]) -> tuple[list[float], list[float]]:
        """Earliest starts and ends."""
        seconds = self._seconds(picked)
        starts = [0.0] * len(seconds)
        for before, after, hop_s in self.edges:
            starts[after] = max(starts[after], starts[before] + seconds[before] + hop_s)
        return starts, [start + second for start, second in zip(starts, seconds, strict=True)]

    def _slack(self, picked: Sequence[int], step_s: float) -> list[float]:
        """Latest less earliest end of each row."""
        seconds = self._seconds(picked)
        _, ends = self._in_time(picked)
        latest = [step_s] * len(seconds)
        for before, after, hop_s in reversed(self.edges):
            latest[before] = min(latest[before], latest[after] - seconds[after] - hop_s)
        return [late - end for late, end in zip(latest, ends, strict=True)]


def _clocks(plan: EnergyPlan) -> list[str]:
    """Of each rank, the share of its rows at each clock; ranks in a row that are alike are one line."""
    mhz = sorted({point.mhz for point in chain(*plan.points)}, reverse=True)
    shares = [tuple(sum(point.mhz == clock for point in rank) for clock in mhz) for rank in plan.points]
    rows = [("rows at MHz", *(f"{clock:g}" for clock in mhz))]
    for counts, run in groupby(range(len(shares)), key=lambda rank: shares[rank]):
        ranks = list(run)
        name = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        rows.append((name, *map(str, counts)))
    return table_lines(rows, right=range(1, len(mhz) + 1))
