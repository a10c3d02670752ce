"""Pipeline schedules as data: a table of rows for each rank.

Generators make tables, the checker refuses bad ones, the simulator computes their times, drawings show them, and the runtime
executes them row by row.

| op | does                                                                                         |
|----|----------------------------------------------------------------------------------------------|
| F  | forward of one microbatch through one stage                                                  |
| B  | its whole backward                                                                           |
| I  | its backward for the stage's input only, which the stage before waits for                    |
| W  | its backward for the stage's weights, any time after I                                       |
| FB | a forward, and the whole backward of another microbatch (and perhaps stage) overlapped with it |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Literal, NamedTuple

from meshkit.parallel.pipeline._paths import Path, after, before, whole

Op = Literal["F", "B", "I", "W", "FB"]
OPS: tuple[Op, ...] = ("F", "B", "I", "W", "FB")


# Tasks and rows are named tuples: searches make, compare and hash hundreds of thousands of them.
class Task(NamedTuple):
    """One op on one microbatch in one stage; `op` is F, B, I or W."""

    op: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


class Row(NamedTuple):
    """One cell of the table. In an FB row, stage and microbatch are the forward's, and the other two the backward's."""

    rank: int
    stage: int
    op: Op
    microbatch: int
    backward_stage: int = -1
    backward_microbatch: int = -1

    @property
    def tasks(self) -> tuple[Task, ...]:
        # The forward first: in this order both ends of the wire count an FB row's two messages.
        if self.op != "FB":
            return (Task(self.op, self.stage, self.microbatch),)
        return Task("F", self.stage, self.microbatch), Task("B", self.backward_stage, self.backward_microbatch)

    def __str__(self) -> str:
        """`0F3`: stage 0, forward, microbatch 3. An FB row is `0F3+2B1`."""
        return "+".join(map(str, self.tasks))


@dataclass(frozen=True)
class Schedule:
    """The rows of every rank in the order it runs them.

    placement[stage] is the stage's rank. Stages are in the order of the model; microbatches count from 0.
    paths[microbatch]: the stages that it passes, in that order; without paths every microbatch passes all, as the model does.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Row, ...], ...]
    paths: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if not self.paths:
            object.__setattr__(self, "paths", (whole(self.stages),) * self.microbatches)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def world(self) -> int:
        """Ranks of the axis pp."""
        return len(self.ranks)

    def rows(self) -> Iterator[Row]:
        for rank in self.ranks:
            yield from rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def before(self, stage: int, microbatch: int) -> int | None:
        """The stage before this one on the microbatch's path; None for the first."""
        return self._before[microbatch].get(stage)

    def after(self, stage: int, microbatch: int) -> int | None:
        """The stage after this one on the microbatch's path; None for the last."""
        return self._after[microbatch].get(stage)

    # By microbatch: a path of many stages takes long to look up.
    @cached_property
    def _before(self) -> tuple[Mapping[int, int], ...]:
        return tuple(map(before, self.paths))

    @cached_property
    def _after(self) -> tuple[Mapping[int, int], ...]:
        return tuple(map(after, self.paths))

    @cached_property
    def skips(self) -> bool:
        """Whether a microbatch leaves stages out, or passes them in another order than the model's."""
        return any(path != whole(self.stages) for path in set(self.paths))

    @cached_property
    def passing(self) -> tuple[int, ...]:
        """Of each stage, how many microbatches pass it."""
        return tuple(sum(stage in path for path in self.paths) for stage in range(self.stages))

    @cached_property
    def ways(self) -> frozenset[tuple[int, int]]:
        """(rank that sends, rank that receives) of hidden states and of their gradients."""
        hops = {hop for path in set(self.paths) for hop in pairwise(path)}
        pairs = {(self.placement[one], self.placement[other]) for one, other in hops}
        return frozenset(way for one, other in pairs if one != other for way in ((one, other), (other, one)))

    @cached_property
    def order(self) -> Order:
        """An order in which the rows can run, each after what it needs. Found once, for every simulation of the table."""
        return _order(self)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether gradients of weights have rows of their own (W), as in zero-bubble schedules."""
        return any(row.op == "W" for row in self.rows())


class Step(NamedTuple):
    """A row in its `Order`. kind: index of its op and stages. needs: (place of a row in the order, rank that runs it) of
    every row whose output this one waits for. sends: the rank to which each of its outputs goes, itself where none does.
    """

    rank: int
    kind: int
    needs: tuple[tuple[int, int], ...]
    sends: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """kinds: rows of which one is as long as the other. places: of each rank's rows in `steps`, as far as they can run.

    stuck: where not all can, (a rank, the index of its first row that cannot, what that waits for).
    """

    steps: tuple[Step, ...]
    kinds: tuple[Row, ...]
    places: tuple[tuple[int, ...], ...]
    stuck: tuple[int, int, Task] | None


def _order(schedule: Schedule) -> Order:
    rank_of = schedule.placement
    place_of: dict[Task, int] = {}  # a B is entered as I, the output for which the stage before waits
    waiting: dict[Task, list[int]] = {}
    kinds: dict[tuple[str, int, int], int] = {}
    examples: list[Row] = []
    steps: list[Step] = []
    places: list[list[int]] = [[] for _ in schedule.ranks]
    # Ranks may be taken in any order: when a row can start depends on the ends of its inputs, not on when it is looked at.
    ready = list(range(schedule.world))
    while ready:
        rank = ready.pop()
        rows, done = schedule.ranks[rank], places[rank]
        while len(done) < len(rows):
            row = rows[len(done)]
            needed = needs(row, schedule)
            missing = next((need for need in needed if need not in place_of), None)
            # Enlisted for one missing input only: woken by that, the rank looks for the next.
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            kind = kinds.setdefault((row.op, row.stage, row.backward_stage), len(kinds))
            if kind == len(examples):
                examples.append(row)
            ends = [output_of(task) for task in row.tasks]
            # An output is known at the end of its row: wake the ranks that waited for it.
            for end in ends:
                place_of[end] = len(steps)
                ready += waiting.pop(end, ())
            done.append(len(steps))
            steps.append(
                Step(
                    rank,
                    kind,
                    tuple((place_of[need], rank_of[need.stage]) for need in needed),
                    tuple(rank_of[next_stage(end, schedule)] for end in ends),
                )
            )
    stuck = None
    if waiting:
        # Of all ranks that wait, the lowest: every rank of a job raises the same text.
        need, ranks = min(waiting.items(), key=lambda item: min(item[1]))
        stuck = min(ranks), len(places[min(ranks)]), need
    return Order(tuple(steps), tuple(examples), tuple(map(tuple, places)), stuck)


def needs(row: Row, schedule: Schedule) -> list[Task]:
    """The tasks for which a row waits; a whole backward counts as I."""
    needed = []
    for task in row.tasks:
        op, stage, microbatch = task
        if op == "W":
            needed.append(Task("I", stage, microbatch))
        elif op != "F":
            needed.append(Task("F", stage, microbatch))
        if (other := need_of(task, schedule)) is not None:
            needed.append(other)
    return needed


def next_stage(end: Task, schedule: Schedule) -> int:
    """The stage that receives the task's output; the task's own stage if none does."""
    follows = {"F": schedule.after, "I": schedule.before}.get(end.op)
    found = None if follows is None else follows(end.stage, end.microbatch)
    return end.stage if found is None else found


def label_of(row: Row, schedule: Schedule) -> str:
    if schedule.stages > schedule.world:
        return str(row)
    return "+".join(f"{task.op}{task.microbatch}" for task in row.tasks)


def lane_name(world: int) -> Callable[[int], str]:
    digits = len(str(world - 1))
    return lambda rank: f"rank {rank:>{digits}} │"


def table_text(schedule: Schedule, *, at: tuple[int, int] | None = None, width: int = 100) -> str:
    """The table as text, one column per cell and without times, so that it also shows a table that cannot run.

    at: (rank, index) of the cell that gets an arrow; the columns and the four ranks to either side of it are drawn.
    """
    cells = [[label_of(row, schedule) for row in rank] for rank in schedule.ranks]
    rank_at, index_at = at or (0, 0)
    longest = max(map(len, cells), default=0)
    name = lane_name(schedule.world)
    size = 1 + max([*map(len, chain(*cells)), len(str(longest))])
    columns = max(1, (width - len(name(0))) // size)
    low = max(0, min(index_at - columns // 2, longest - columns))
    # Only what lies around the arrow: a table of 64 ranks and 1,000 cells would hide it.
    shown = range(low, min(longest, low + columns))
    lines = [f"{'cell':{len(name(0)) - 2}}  " + "".join(f"{index:<{size}}" for index in shown)]
    for rank, row in enumerate(cells):
        if at is not None and abs(rank - rank_at) > 4:
            continue
        lines.append(name(rank) + "".join(f"{label:<{size}}" for label in row[shown.start : shown.stop]))
        if at is not None and rank == rank_at:
            lines.append(" " * (len(name(0)) + (index_at - low) * size) + "^")
    return "\n".join(line.rstrip() for line in lines)


# Messages between stages: hidden states and their gradients, as far as they cross ranks.


class Message(NamedTuple):
    """The output of F for the next stage of a path, or of B or I for the stage before on it, from one rank to another."""

    output: Task
    """the task whose output is sent, F or I; the input gradient that a B computes is named I too, see `output_of`"""
    source: int
    target: int
    sent_by: int
    """index of the row on the source that computes it"""
    needed_by: int
    """index of the row on the target that cannot start without it"""


def output_of(task: Task) -> Task:
    """The name under which other stages know a task's output: the input gradient of a whole backward B is called I."""
    return Task("I", task.stage, task.microbatch) if task.op == "B" else task


def need_of(task: Task, schedule: Schedule) -> Task | None:
    """The output of another stage that a task needs, if any."""
    op, stage, microbatch = task
    if op == "W":
        return None
    other = schedule.before(stage, microbatch) if op == "F" else schedule.after(stage, microbatch)
    return None if other is None else Task("F" if op == "F" else "I", other, microbatch)


def messages(schedule: Schedule) -> Iterator[Message]:
    """Every message of the table, in the order in which its source sends; forwards alone are a table too."""
    # One reader for each output: an activation goes to the next stage of its path, an input gradient to the stage before.
    needed = {
        need: (rank, index)
        for rank, rows in enumerate(schedule.ranks)
        for index, row in enumerate(rows)
        for task in row.tasks
        if (need := need_of(task, schedule)) is not None
    }
    for source, rows in enumerate(schedule.ranks):
        for sent_by, row in enumerate(rows):
            for task in row.tasks:
                if task.op == "W" or (output := output_of(task)) not in needed:
                    continue
                target, needed_by = needed[output]
                if target != source:
                    yield Message(output, source, target, sent_by, needed_by)
