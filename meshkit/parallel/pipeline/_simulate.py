"""Simulating a pipeline schedule: the start and end of every row, the pipeline bubble, and the activations of each rank.

The table fixes the order of rows on each rank, so times are a longest path: a row starts when its rank is free and its inputs
have arrived. Nothing is searched, and every row is visited once.

| task              | waits for                                                                          |
|-------------------|------------------------------------------------------------------------------------|
| F of stage s      | F of the stage before on the microbatch's path, s-1 where it passes all            |
| B or I of stage s | B or I of the stage after on it, s+1 where it passes all, and the F of its stage   |
| W                 | the I of its own stage                                                             |
| FB                | what its F and its B wait for; both end when the row ends                          |

An input from another rank arrives one hop later. meshkit runs the halves of an FB row one after the other, and sends what its
F made when that ends: such steps are faster than this by what the next rank had waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from math import fsum
from typing import NamedTuple, NoReturn

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._table import Row, Schedule, Task

PerStage = float | tuple[float, ...]


def overlap(hidden: float) -> Callable[[float, float], float]:
    """The time of an FB row that hides a share of its shorter half: hidden=0 is one after the other, 1 is max(F, B)."""
    return partial(_overlapped, hidden)


def _overlapped(hidden: float, f_s: float, b_s: float) -> float:
    return max(f_s, b_s) + (1.0 - hidden) * min(f_s, b_s)


ONE_AFTER_THE_OTHER = overlap(0.0)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds each op takes, and activations each microbatch holds. One value is for all stages; a tuple has one per stage.

    Without arguments: unit times, F = I = W = 1, free hops, one unit of activations per stage and microbatch.
    """

    f_s: PerStage = 1.0
    i_s: PerStage = 1.0
    w_s: PerStage = 1.0
    b_s: PerStage | None = None
    """the whole backward; None is I + W"""
    fb_s: Callable[[float, float], float] = ONE_AFTER_THE_OTHER
    """an FB row out of the times of its F and its B"""
    hop_s: float | Callable[[int, int], float] = 0.0
    """time of a message between ranks, or a function of (from, to); it delays the receiver only"""
    blocking: bool = False
    """sends block: the sender computes nothing while its message is under way"""
    freed_by_i: PerStage = 0.0
    """activations held from the start of F to the end of I, in any unit"""
    freed_by_w: PerStage = 1.0
    """activations held from the start of F to the end of W; B frees both"""


class Event(NamedTuple):
    """One row with its start and end."""

    row: Row
    start_s: float
    end_s: float


class Level(NamedTuple):
    """From `time_s` on, a rank holds `units` of activations."""

    time_s: float
    units: float


@dataclass(frozen=True)
class Simulation:
    """What `simulate` found. Everything per rank is in the order of the ranks, and then in the order of the table.

    starts_s, ends_s: of each row.
    """

    schedule: Schedule
    times: Times
    starts_s: tuple[tuple[float, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]

    @cached_property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        return tuple(
            tuple(map(Event, rows, starts, ends))
            for rows, starts, ends in zip(self.schedule.ranks, self.starts_s, self.ends_s, strict=True)
        )

    @cached_property
    def makespan_s(self) -> float:
        """From the first start on any rank, which is 0, to the last end on any rank."""
        return max(chain(*self.ends_s), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        return tuple(
            fsum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts_s, self.ends_s, strict=True)
        )

    @cached_property
    def span_s(self) -> tuple[float, ...]:
        """Of each rank, from its first start to its last end."""
        return tuple(
            ends[-1] - starts[0] if ends else 0.0 for starts, ends in zip(self.starts_s, self.ends_s, strict=True)
        )

    @property
    def bubble_rate(self) -> float:
        """1 - busy / (makespan * ranks): the share of the step in which ranks compute nothing, hops included.

        With one stage per rank and equal times it is the zero-bubble papers' (cost - m (F + B + W)) / cost.
        """
        return _idle(self.busy_s, self.makespan_s)

    @property
    def span_bubble_rate(self) -> float:
        """The same, with the longest span of a rank in place of the makespan.

        ZB-H2's bubble is zero in this sense: ranks start and end one after another, and the next step fills the corners.
        That takes an optimizer step without a barrier.
        """
        return _idle(self.busy_s, max(self.span_s, default=0.0))

    @cached_property
    def memory(self) -> tuple[tuple[Level, ...], ...]:
        """Activations of each rank over time: levels in order, from 0 at time 0 on."""
        return tuple(tuple(_levels(rank, self.schedule, self.times)) for rank in self.events)

    @cached_property
    def peak_units(self) -> tuple[float, ...]:
        """The most activations each rank holds at a time, in the unit of `Times`."""
        return tuple(max((level.units for level in rank), default=0.0) for rank in self.memory)


def simulate(schedule: Schedule, times: Times | None = None) -> Simulation:
    """Compute the times of every row of the table.

    Hops delay their receivers but not one another: links are not shared. Activations are counted from the start of F; inputs
    that a rank has received and not used yet are not counted.
    Raises: PlanError if the table stops, or if `times` has another number of stages.
    Source: the dependencies are those of Qi et al. 2023 (arXiv 2401.10241), section 3.1.
    """
    times = times or Times()
    duration = _durations(schedule, times)
    hop = _hop(times)
    order = schedule.order
    if order.stuck is not None:
        _refuse_unfinished(schedule, *order.stuck)
    lasts = [duration(row) for row in order.kinds]
    ranks = range(schedule.world)
    hops = {pair: hop(*pair) for pair in {(source, step.rank) for step in order.steps for _, source in step.needs}}
    clock = [0.0 for _ in ranks]
    starts: list[float] = []
    ends: list[float] = []
    for rank, kind, needed, sends in order.steps:
        start_s = clock[rank]
        for place, source in needed:
            arrives_s = ends[place] + hops[source, rank]
            if arrives_s > start_s:
                start_s = arrives_s
        end_s = start_s + lasts[kind]
        starts.append(start_s)
        ends.append(end_s)
        if times.blocking:
            for target in sends:
                end_s += hop(rank, target)
        clock[rank] = end_s
    return Simulation(
        schedule,
        times,
        tuple(tuple([starts[place] for place in places]) for places in order.places),
        tuple(tuple([ends[place] for place in places]) for places in order.places),
    )


def _refuse_unfinished(schedule: Schedule, rank: int, index: int, need: Task) -> NoReturn:
    what = {"F": "forward", "I": "backward"}[need.op]
    raise PlanError(
        f"schedule {schedule.name!r} stops: in cell {index}, {schedule.ranks[rank][index]}, rank {rank} waits for the "
        f"{what} of microbatch {need.microbatch} through stage {need.stage}, which never ends.\n"
        "check(schedule) draws the table and says what is wrong with it."
    )


def _durations(schedule: Schedule, times: Times) -> Callable[[Row], float]:
    f_s = _per_stage("f_s", times.f_s, schedule)
    i_s = _per_stage("i_s", times.i_s, schedule)
    w_s = _per_stage("w_s", times.w_s, schedule)
    b_s = (
        tuple(i + w for i, w in zip(i_s, w_s, strict=True))
        if times.b_s is None
        else _per_stage("b_s", times.b_s, schedule)
    )
    of_op = {"F": f_s, "I": i_s, "W": w_s, "B": b_s}

    def duration(row: Row) -> float:
        if row.op == "FB":
            return times.fb_s(f_s[row.stage], b_s[row.backward_stage])
        return of_op[row.op][row.stage]

    return duration


def _levels(events: Sequence[Event], schedule: Schedule, times: Times) -> Iterator[Level]:
    freed_by_i = _per_stage("freed_by_i", times.freed_by_i, schedule)
    freed_by_w = _per_stage("freed_by_w", times.freed_by_w, schedule)
    live_units = 0.0
    yield Level(0.0, live_units)
    for row, start_s, end_s in events:
        # Taken at the start and freed at the end, so that an FB row counts both of its microbatches while it runs.
        for op, stage, _ in row.tasks:
            if op == "F":
                live_units += freed_by_i[stage] + freed_by_w[stage]
                yield Level(start_s, live_units)
        for op, stage, _ in row.tasks:
            if op != "F":
                live_units -= (freed_by_i[stage] if op != "W" else 0.0) + (freed_by_w[stage] if op != "I" else 0.0)
                yield Level(end_s, live_units)


def _per_stage(name: str, value: PerStage, schedule: Schedule) -> tuple[float, ...]:
    values = tuple(value) if isinstance(value, tuple) else (value,) * schedule.stages
    if len(values) != schedule.stages:
        raise PlanError(
            f"{name} has {len(values)} values, but schedule {schedule.name!r} has {schedule.stages} stages. "
            "Give one value per stage, or one for all."
        )
    if not all(0 <= value < float("inf") for value in values):
        raise PlanError(f"{name}={value} is not a time or an amount: give numbers from 0 up.")
    return values


def _hop(times: Times) -> Callable[[int, int], float]:
    hop_s = times.hop_s
    if callable(hop_s):
        # Between stages of one rank nothing is sent.
        return lambda source, target: hop_s(source, target) if source != target else 0.0
    return lambda source, target: hop_s if source != target else 0.0


def _idle(busy_s: tuple[float, ...], step_s: float) -> float:
    return 1.0 - fsum(busy_s) / (step_s * len(busy_s)) if step_s else 0.0
