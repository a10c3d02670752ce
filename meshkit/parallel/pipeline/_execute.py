"""Run a checked table: one rank's rows, top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshkit.core.rng import KEYS, using_keys
from meshkit.errors import PlanError
from meshkit.moe.aux_loss import Collected, collect
from meshkit.parallel.pipeline._p2p import P2P
from meshkit.parallel.pipeline._record import Recording
from meshkit.parallel.pipeline._split_backward import Later, put_off
from meshkit.parallel.pipeline._stages import StagedModel
from meshkit.parallel.pipeline._table import Schedule, Task, made_by, need_of

Loss = Callable[[Any, Any], Tensor]


@dataclass
class _Live:
    """What a forward leaves for its backward."""

    hidden: Tensor | None  # what the stage received, a leaf
    # Where its backward begins: at the output, and at auxiliary losses. Nowhere in a first stage that trains nothing.
    # [Note: a stage's output need not outlive its forward]
    # An edge names the node that made a tensor, and backward needs no more: the output's own memory is freed as soon as its
    # message has gone, where a reference to the tensor would hold one hidden state for each microbatch in flight.
    ends: list[GradientEdge]
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
        with self.staged.running(
            self.stage, self.hidden
        ) as model:  # ends before `_Done` leaves: the model is whole again
            output = model(*args, **kwargs)
        if self.stage == self.staged.stages.count - 1:
            return output
        hidden = getattr(output, "logits", output)
        if not isinstance(hidden, Tensor):
            raise PlanError(
                f"pipeline: stage {self.stage} ends in a {type(hidden).__name__}, not in one hidden state. A model on pp "
                "returns logits, plain or as `.logits`; one that predicts further ahead needs a mesh without pp."
            )
        raise _Done(hidden)

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
    mail: P2P,
    parts: Sequence[tuple[Any, float]],
    loss: Loss,
    scale: Tensor,
    recording: Recording | None = None,
) -> tuple[list[Tensor], list[tuple[Collected, float]]]:
    """Forwards and backwards of all microbatches.

    Returns the losses of those whose last stage is here, and what the routers of each forward reported with what its loss
    counts, both in the table's order.
    parts: (microbatch, what its loss counts); scale: what losses are divided by before their backward. The two halves of an
    FB row run one after the other, with the messages of both on their way.
    """
    step = _Step(schedule, staged, mail, parts, loss, scale, recording)
    if recording is not None:
        recording.begin(schedule)
    for index, row in enumerate(schedule.ranks[rank]):
        # A row ahead: see [Note: receives are posted in the sender's order].
        mail.expect(index)
        mail.expect(index + 1)
        for task in row.tasks:
            try:
                step.run(task)
            except Exception as error:
                error.add_note(
                    f"pipeline {schedule.name!r}: pp rank {rank}, stage {task.stage}, {task.op} of microbatch "
                    f"{task.microbatch}"
                )
                raise
    mail.finish()
    return step.losses, step.noted


class _Step:
    """One rank's tasks, and what its forwards have left for backwards that are still to come."""

    def __init__(
        self,
        schedule: Schedule,
        staged: StagedModel,
        mail: P2P,
        parts: Sequence[tuple[Any, float]],
        loss: Loss,
        scale: Tensor,
        recording: Recording | None,
    ) -> None:
        self.stages, self.staged, self.mail, self.parts = schedule.stages, staged, mail, parts
        self.loss, self.scale, self.recording = loss, scale, recording
        self.live: dict[tuple[int, int], _Live] = {}
        self.losses: list[Tensor] = []
        self.noted: list[tuple[Collected, float]] = []

    def run(self, task: Task) -> None:
        need = need_of(task, self.stages)
        received = self.mail.receive(need) if need is not None else None
        measured = self.recording.measure(task) if self.recording is not None else nullcontext()
        with measured, using_keys(self.parts[task.microbatch][0].get(KEYS)):
            if task.op == "F":
                self._forward(task, received)
            elif task.op in ("B", "I"):
                self._backward(task, received)
            if task.op in ("B", "W"):
                # The last use of what the forward kept: with the entry go its graph and the products put off.
                self.live.pop((task.stage, task.microbatch)).later.run()

    def _forward(self, task: Task, hidden: Tensor | None) -> None:
        if hidden is not None:
            # A leaf of this stage's own graph: backward stops here, and leaves in `.grad` what the stage before needs.
            hidden = hidden.detach().requires_grad_()
        part, weight = self.parts[task.microbatch]
        with collect() as found:
            out = forward(self.staged, task.stage, hidden, part, self.loss)
        self.noted.append((found, weight))
        side = found.total() * weight / self.scale if found.losses else None
        if task.stage == self.stages - 1:
            self.losses.append(out.detach() * weight)
            out = out * weight / self.scale
        else:
            self.mail.send(task, out.detach())
        # See [Note: a stage's output need not outlive its forward].
        ends = [get_gradient_edge(end) for end in (out, side) if end is not None and end.requires_grad]
        self.live[task.stage, task.microbatch] = _Live(hidden, ends)

    def _backward(self, task: Task, grad: Tensor | None) -> None:
        state = self.live[task.stage, task.microbatch]
        with put_off(state.later) if task.op == "I" else nullcontext():
            if not state.ends:
                return
            # One call for both ends, so that a node which both reach runs once, with the sum of their gradients. Auxiliary
            # losses are scalars, whose gradient is 1.
            torch.autograd.backward(state.ends, [grad, *[None] * (len(state.ends) - 1)])
        if state.hidden is not None:
            assert state.hidden.grad is not None
            self.mail.send(made_by(task), state.hidden.grad)
        # The input and the nodes go now, also where W is still to come: what it needs is in `later`.
        state.hidden = None
        state.ends = []
