"""Run a checked table: one rank's rows, top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._split_backward import Later, put_off
from meshkit.parallel.pipeline._stages import StagedModel
from meshkit.parallel.pipeline._table import Schedule, Task
from meshkit.parallel.pipeline._transfer import Mail, Message

Loss = Callable[[Any, Any], Tensor]


@dataclass
class _Live:
    """What a forward leaves for its backward."""

    hidden: Tensor | None  # what the stage received, a leaf
    out: Tensor
    later: Later = field(default_factory=Later)


class _Done(Exception):
    """Leaves a loss function once the stage has made its hidden state: what follows belongs to the last stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _StageModel:
    """What the loss function calls as its model: one stage of it."""

    def __init__(self, staged: StagedModel, stage: int, hidden: Tensor | None) -> None:
        self.staged, self.stage, self.hidden = staged, stage, hidden

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.staged.running(self.stage, self.hidden) as model:
            output = model(*args, **kwargs)
        if self.stage == self.staged.stages.count - 1:
            return output
        raise _Done(getattr(output, "logits", output))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.staged.model, name)


def forward(staged: StagedModel, stage: int, hidden: Tensor | None, part: Any, loss: Loss) -> Tensor:
    """The stage's hidden state, or from the last stage the loss of the part."""
    try:
        value = loss(_StageModel(staged, stage, hidden), part)
    except _Done as done:
        return done.hidden
    if stage < staged.stages.count - 1:
        raise PlanError("pipeline: the loss function did not call its model, so there is nothing to hand on.")
    return value


def execute(
    schedule: Schedule,
    rank: int,
    staged: StagedModel,
    mail: Mail,
    parts: Sequence[tuple[Any, float]],
    loss: Loss,
    scale: Tensor,
    on_task: Callable[[Task], Any] | None = None,
) -> list[Tensor]:
    """Forwards and backwards of all microbatches; the losses of those whose last stage is here, in the table's order.

    parts: (microbatch, what its loss counts); scale: what losses are divided by before their backward.
    """
    live: dict[tuple[int, int], _Live] = {}
    losses: list[Tensor] = []

    def run_forward(stage: int, microbatch: int) -> None:
        hidden = None
        if stage > 0:
            source = schedule.placement[stage - 1]
            hidden = mail.receive(source, Message("F", stage, microbatch)).detach().requires_grad_()
        part, weight = parts[microbatch]
        out = forward(staged, stage, hidden, part, loss)
        if stage == schedule.stages - 1:
            out = out * weight
            losses.append(out.detach())
            out = out / scale
        else:
            mail.send(schedule.placement[stage + 1], Message("F", stage + 1, microbatch), out.detach())
        live[stage, microbatch] = _Live(hidden, out)

    def run_backward(stage: int, microbatch: int) -> None:
        state = live[stage, microbatch]
        grad = None
        if stage < schedule.stages - 1:
            grad = mail.receive(schedule.placement[stage + 1], Message("B", stage, microbatch))
        with put_off(state.later):
            state.out.backward(grad)
        if state.hidden is not None:
            assert state.hidden.grad is not None
            mail.send(schedule.placement[stage - 1], Message("B", stage - 1, microbatch), state.hidden.grad)
            state.hidden = None
        state.out = state.out.detach()

    def run(task: Task) -> None:
        if task.op == "F":
            run_forward(task.stage, task.microbatch)
        elif task.op in ("B", "I"):
            run_backward(task.stage, task.microbatch)
        if task.op in ("B", "W"):
            live.pop((task.stage, task.microbatch)).later.run()

    for row in schedule.ranks[rank]:
        for task in row.tasks:
            if on_task is not None:
                on_task(task)
            try:
                run(task)
            except Exception as error:
                error.add_note(
                    f"pipeline {schedule.name!r}: pp rank {rank}, stage {task.stage}, {task.op} of microbatch "
                    f"{task.microbatch}"
                )
                raise
    mail.finish()
    return losses
