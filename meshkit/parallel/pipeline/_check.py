"""Checking a pipeline schedule: refuse a table that cannot run, and derive the messages and memory of one that can."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._table import OPS, Message, Row, Schedule, Task, messages, need_of, output_of, table_text

Cell = tuple[int, int]
"""(rank, index of the row on the rank)"""


@dataclass(frozen=True)
class Checked:
    """A schedule that is known to run to its end with buffered sends, with its messages and activations."""

    schedule: Schedule

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """In the order in which their sources send."""
        return tuple(messages(self.schedule))

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """Per rank, the most (stage, microbatch) pairs with live activations, which is from F to the end of B or W."""
        return tuple(peak_live(task for row in rows for task in row.tasks) for rows in self.schedule.ranks)

    @cached_property
    def sends(self) -> tuple[tuple[Message, ...], ...]:
        """Per rank, in the order of its rows."""
        ranks = range(self.schedule.world)
        return tuple(tuple(message for message in self.messages if message.source == rank) for rank in ranks)

    @cached_property
    def receives(self) -> tuple[tuple[Message, ...], ...]:
        """Per rank, in the order in which its rows need them.

        This may differ from the order in which they are sent: ZBV's rank 1 receives activations and gradients from rank 0
        and may use them in another order.
        """
        by_need = sorted(self.messages, key=lambda message: message.needed_by)
        ranks = range(self.schedule.world)
        return tuple(tuple(message for message in by_need if message.target == rank) for rank in ranks)

    @cached_property
    def rendezvous(self) -> bool:
        """Whether it also ends if sends are unbuffered: each waits until the other rank has reached the receive.

        Each rank then receives a row's inputs, runs the row, and sends its outputs, one after the other. 1F1B does not end:
        two neighbours send to one another, and neither receives. Such a schedule needs sends that do not block.
        """
        scripts = [list(self._script(rank)) for rank in range(self.schedule.world)]
        step = [0] * len(scripts)
        active = deque(range(len(scripts)))
        # A rank is looked at again whenever one of its messages was matched, so each message is matched once.
        while active:
            rank = active.popleft()
            while step[rank] < len(scripts[rank]):
                message = scripts[rank][step[rank]]
                other = message.target if message.source == rank else message.source
                if step[other] == len(scripts[other]) or scripts[other][step[other]] != message:
                    break
                step[rank] += 1
                step[other] += 1
                active.append(other)
        return all(step[rank] == len(script) for rank, script in enumerate(scripts))

    @cached_property
    def in_order(self) -> bool:
        """Whether each rank needs messages in the order in which they are sent. If not, receives are posted ahead of need."""
        return all(
            [message for message in self.sends[source] if message.target == target]
            == [message for message in self.receives[target] if message.source == source]
            for source in range(self.schedule.world)
            for target in range(self.schedule.world)
        )

    def _script(self, rank: int) -> Iterator[Message]:
        sends, receives = deque(self.sends[rank]), deque(self.receives[rank])
        for index in range(len(self.schedule.ranks[rank])):
            while receives and receives[0].needed_by == index:
                yield receives.popleft()
            while sends and sends[0].sent_by == index:
                yield sends.popleft()


def check(schedule: Schedule) -> Checked:
    """Check that every forward and backward of each path is there once, on its stage's rank, and in an order that ends.

    Raises: PlanError with the table drawn and an arrow at the bad cell.
    """
    # In this order: each check may use as an index or a key what those before it have accepted.
    _check_shape(schedule)
    for rank, rows in enumerate(schedule.ranks):
        for index, row in enumerate(rows):
            _check_cell(schedule, rank, index, row)
    cells = _check_once(schedule)
    _check_complete(schedule, cells)
    if schedule.order.stuck is not None:
        _refuse_circle(schedule, cells)
    return Checked(schedule)


def peak_live(tasks: Iterable[Task]) -> int:
    """The most (stage, microbatch) pairs whose activations are alive at a time, each from F to the end of B or W."""
    live = peak = 0
    # An I frees nothing: its W still multiplies the inputs of the linear layers.
    for task in tasks:
        live += {"F": 1, "I": 0}.get(task.op, -1)
        peak = max(peak, live)
    return peak


def _refuse(schedule: Schedule, cell: Cell, problem: str, change: str) -> NoReturn:
    raise PlanError(f"schedule {schedule.name!r}: {problem}\n{table_text(schedule, at=cell)}\n{change}")


def _check_shape(schedule: Schedule) -> None:
    if schedule.microbatches < 1 or not schedule.placement:
        raise PlanError(
            f"schedule {schedule.name!r} has {schedule.stages} stages and {schedule.microbatches} microbatches; it needs at "
            "least one of each."
        )
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.world:
            raise PlanError(
                f"schedule {schedule.name!r}: placement puts stage {stage} on rank {rank}, but the table has "
                f"{schedule.world} ranks.\nGive the table a line for every rank of placement."
            )
    _check_paths(schedule)


def _check_paths(schedule: Schedule) -> None:
    last = schedule.stages - 1
    if len(schedule.paths) != schedule.microbatches:
        raise PlanError(
            f"schedule {schedule.name!r} has {len(schedule.paths)} paths for {schedule.microbatches} microbatches. Give each "
            "one, or none for all stages in order."
        )
    for microbatch, path in enumerate(schedule.paths):
        problem = ""
        if any(not 0 <= stage <= last for stage in path):
            problem = f"stages count from 0 to {last}"
        elif path[:1] != (0,) or path[-1:] != (last,):
            problem = f"it begins at stage 0, which has the embedding, and ends at stage {last}, which has the loss"
        elif len(set(path)) != len(path):
            problem = "a microbatch passes a stage once"
        if problem:
            raise PlanError(
                f"schedule {schedule.name!r}: the path of microbatch {microbatch} is {path}, but {problem}. Change the path, "
                "and its rows."
            )


def _check_cell(schedule: Schedule, rank: int, index: int, row: Row) -> None:
    at = f"cell {index} of rank {rank}, {row}"
    if row.rank != rank:
        _refuse(schedule, (rank, index), f"{at}, is of rank {row.rank}.", f"Move it to the rows of rank {row.rank}.")
    if row.op not in OPS:
        _refuse(schedule, (rank, index), f"{at}, has op {row.op!r}.", f"The ops are {', '.join(OPS)}.")
    for task in row.tasks:
        if not 0 <= task.stage < schedule.stages:
            problem = f"{at}, is of stage {task.stage}, but there are {schedule.stages}."
            _refuse(schedule, (rank, index), problem, f"Stages count from 0 to {schedule.stages - 1}.")
        if not 0 <= task.microbatch < schedule.microbatches:
            problem = f"{at}, is of microbatch {task.microbatch}, but there are {schedule.microbatches}."
            _refuse(schedule, (rank, index), problem, f"Microbatches count from 0 to {schedule.microbatches - 1}.")
        if task.stage not in schedule.paths[task.microbatch]:
            path = schedule.paths[task.microbatch]
            problem = (
                f"{at}, is of stage {task.stage}, which is not on the path of microbatch {task.microbatch}, {path}."
            )
            _refuse(schedule, (rank, index), problem, "Leave it out, or change the path.")
        if schedule.placement[task.stage] != rank:
            owner = schedule.placement[task.stage]
            problem = f"{at}, is of stage {task.stage}, which is on rank {owner}."
            _refuse(schedule, (rank, index), problem, f"Move it to rank {owner}, or change placement[{task.stage}].")


def _check_once(schedule: Schedule) -> dict[Task, Cell]:
    """Refuse a task that is there twice, a microbatch with both kinds of backward, and a backward before its forward."""
    cells: dict[Task, Cell] = {}
    for rank, rows in enumerate(schedule.ranks):
        for index, row in enumerate(rows):
            for task in row.tasks:
                _check_task(schedule, task, (rank, index), cells)
                cells[task] = rank, index
    return cells


def _check_task(schedule: Schedule, task: Task, cell: Cell, cells: dict[Task, Cell]) -> None:
    rank, index = cell
    position = f"cell {index} of rank {rank}"
    if task in cells:
        first = cells[task][1]
        _refuse(schedule, cell, f"{task} is in cell {first} and again in cell {index} of rank {rank}.", "Keep one.")
    for other in "IW" if task.op == "B" else "B" if task.op in "IW" else "":
        if (conflict := task._replace(op=other)) in cells:
            problem = (
                f"{position} has {task}, but cell {cells[conflict][1]} has {conflict}: two "
                "kinds of backward for one microbatch."
            )
            _refuse(schedule, cell, problem, "Use either B, or I and W.")
    # Not before it means nowhere so far, or in this very cell: the halves of an FB row overlap, so its F is no earlier one.
    needed = {"B": "F", "I": "F", "W": "I"}.get(task.op)
    if needed and cells.get(before := task._replace(op=needed), cell) == cell:
        problem = f"{position} has {task}, but {before} is not in a cell before it."
        _refuse(schedule, cell, problem, f"Put {before} before {task} on rank {rank}.")


def _check_complete(schedule: Schedule, cells: dict[Task, Cell]) -> None:
    for stage, rank in enumerate(schedule.placement):
        end = len(schedule.ranks[rank])
        for microbatch in range(schedule.microbatches):
            if stage not in schedule.paths[microbatch]:
                continue
            forward, backward, input_, weight = (Task(op, stage, microbatch) for op in "FBIW")
            if forward not in cells:
                problem = f"rank {rank} has no forward of microbatch {microbatch} in stage {stage}."
                _refuse(schedule, (rank, end), problem, f"Add {forward}, and its backward.")
            if backward not in cells and input_ not in cells:
                problem = f"rank {rank} has no backward for {forward} in cell {cells[forward][1]}."
                _refuse(schedule, cells[forward], problem, f"Add {backward}, or {input_} and {weight}.")
            if input_ in cells and weight not in cells:
                problem = f"rank {rank} has no weight gradient for {input_} in cell {cells[input_][1]}."
                _refuse(schedule, cells[input_], problem, f"Add {weight} after {input_}, or make that {backward}.")


def _refuse_circle(schedule: Schedule, cells: dict[Task, Cell]) -> NoReturn:
    """Run the rows with buffered sends, of which not all end, and name those that wait for one another (a deadlock)."""
    ended = [0] * schedule.world
    producers = {output_of(task): task for task in cells if task.op != "W"}

    # Only outputs of other stages are asked for: `_check_once` has seen that those of the same stage come before on the rank.
    def missing(rank: int) -> Task | None:
        for task in schedule.ranks[rank][ended[rank]].tasks:
            need = need_of(task, schedule)
            if need is not None:
                other, index = cells[producers[need]]
                if index >= ended[other]:
                    return producers[need]
        return None

    # Rows never undo one another, so running whatever can run in any order finds every row that can.
    moved = True
    while moved:
        moved = False
        for rank, rows in enumerate(schedule.ranks):
            while ended[rank] < len(rows) and missing(rank) is None:
                ended[rank] += 1
                moved = True
    stuck = next(rank for rank, rows in enumerate(schedule.ranks) if ended[rank] < len(rows))
    # Every stuck rank waits for another one, so following the waits leads into a circle.
    circle: list[int] = []
    while stuck not in circle:
        circle.append(stuck)
        need = missing(stuck)
        assert need is not None, "a stuck rank waits for something"
        stuck = cells[need][0]
    circle = circle[circle.index(stuck) :]
    waits = []
    for rank in circle:
        need = missing(rank)
        assert need is not None, "a stuck rank waits for something"
        other, index = cells[need]
        row = schedule.ranks[rank][ended[rank]]
        waits.append(f"  rank {rank} stops in cell {ended[rank]}, {row}: it needs {need}, cell {index} of rank {other}")
    cell = circle[0], ended[circle[0]]
    problem = "the ranks wait for one another and never end.\n" + "\n".join(waits)
    _refuse(schedule, cell, problem, "Move one of the rows that are needed before the row its rank stops in.")
