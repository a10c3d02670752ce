"""What goes between stages: who makes it, who needs it, and which of it crosses ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshkit.parallel.pipeline._table import Schedule, Task


class Message(NamedTuple):
    """The output of F for the stage after, or of B or I for the stage before, from one rank to another."""

    made: Task
    """F or I: what the stage before waits for is made by a whole backward, too"""
    source: int
    target: int
    sent_by: int
    """index of the row on the source that makes it"""
    needed_by: int
    """index of the row on the target that cannot start without it"""


def made_by(task: Task) -> Task:
    """What a task makes for others: a whole backward makes what its input gradient does."""
    return task._replace(op="I") if task.op == "B" else task


def need_of(task: Task, stages: int) -> Task | None:
    """What a task needs of another stage."""
    if task.op == "F" and task.stage > 0:
        return task._replace(stage=task.stage - 1)
    if task.op in "BI" and task.stage + 1 < stages:
        return Task("I", task.stage + 1, task.microbatch)
    return None


def messages(schedule: Schedule) -> Iterator[Message]:
    """Every message of the table, in the order in which its source sends; forwards alone are a table too."""
    needed = {
        need: (rank, index)
        for rank, rows in enumerate(schedule.ranks)
        for index, row in enumerate(rows)
        for task in row.tasks
        if (need := need_of(task, schedule.stages)) is not None
    }
    for source, rows in enumerate(schedule.ranks):
        for sent_by, row in enumerate(rows):
            for task in row.tasks:
                if task.op == "W" or (made := made_by(task)) not in needed:
                    continue
                target, needed_by = needed[made]
                if target != source:
                    yield Message(made, source, target, sent_by, needed_by)
