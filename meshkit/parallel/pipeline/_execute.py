"""The pipeline runtime: executes one rank's rows of a checked schedule, top to bottom."""

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
from meshkit.parallel.pipeline._split_backward import DeferredWeightGradients, defer_weight_gradients
from meshkit.parallel.pipeline._stages import StagedModel
from meshkit.parallel.pipeline._table import Schedule, Task, need_of, output_of

Loss = Callable[[Any, Any], Tensor]


@dataclass
class _Live:
    """What a forward keeps for its backward."""

    hidden: Tensor | None  # the received input of the stage, a leaf whose `.grad` goes to the stage before
    # The roots of the stage's backward: its output, and its auxiliary losses. None in a first stage that trains nothing.
    # [Note: a stage's output need not outlive its forward]
    # A GradientEdge refers to the node that made a tensor and not to the tensor, and backward needs no more. So the output's
    # memory is freed once it has been sent; a reference would keep one hidden state alive for each microbatch in flight.
    roots: list[GradientEdge]
    deferred: DeferredWeightGradients = field(default_factory=DeferredWeightGradients)


class _StageOutput(Exception):
    """Raised to leave the loss function once the stage has its output: the rest of the function is the last stage's."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _StageModel:
    """The model that the loss function is given: calling it runs one stage."""

    def __init__(self, staged: StagedModel, stage: int, hidden: Tensor | None) -> None:
        self.staged, self.stage, self.hidden = staged, stage, hidden

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Left before `_StageOutput` is raised, so the model has all its modules again whatever the loss function does.
        with self.staged.running(self.stage, self.hidden) as model:
            output = model(*args, **kwargs)
        if self.stage == self.staged.stages.count - 1:
            return output
        # The stand-in of the head has returned the hidden state where transformers' models put logits.
        hidden = getattr(output, "logits", output)
        if not isinstance(hidden, Tensor):
            raise PlanError(
                f"pipeline: stage {self.stage} ends in a {type(hidden).__name__}, not in one hidden state. A model on pp "
                "returns logits, plain or as `.logits`; one that predicts further ahead needs a mesh without pp."
            )
        raise _StageOutput(hidden)

    # Loss functions read their model's config or call its head: whatever is not the forward is the model's own.
    def __getattr__(self, name: str) -> Any:
        return getattr(self.staged.model, name)


def forward(staged: StagedModel, stage: int, hidden: Tensor | None, microbatch: Any, loss: Loss) -> Tensor:
    """Run one stage on a microbatch: returns the hidden state, or in the last stage the loss."""
    try:
        value = loss(_StageModel(staged, stage, hidden), microbatch)
    except _StageOutput as output:
        return output.hidden
    if stage < staged.stages.count - 1:
        raise PlanError("pipeline: the loss function did not call its model, so there is nothing to hand on.")
    return value


def execute(
    schedule: Schedule,
    rank: int,
    staged: StagedModel,
    p2p: P2P,
    microbatches: Sequence[tuple[Any, float]],
    loss: Loss,
    scale: Tensor,
    recording: Recording | None = None,
) -> tuple[list[Tensor], list[tuple[Collected, float]]]:
    """Run the forwards and backwards of all microbatches.

    Returns the losses, if the last stage is on this rank, and for each forward (report of its routers, weight of its loss);
    both in the order of the table.
    microbatches: (microbatch, weight of its loss). scale: losses are divided by it before their backward. The two halves of
    an FB row run one after the other, with the messages of both under way.
    """
    step = _Step(schedule, staged, p2p, microbatches, loss, scale, recording)
    if recording is not None:
        recording.begin(schedule)
    for index, row in enumerate(schedule.ranks[rank]):
        # A row ahead: see [Note: receives are posted in the sender's order].
        p2p.expect(index)
        p2p.expect(index + 1)
        for task in row.tasks:
            try:
                step.run(task)
            except Exception as error:
                error.add_note(
                    f"pipeline {schedule.name!r}: pp rank {rank}, stage {task.stage}, {task.op} of microbatch "
                    f"{task.microbatch}"
                )
                raise
    p2p.finish()
    return step.losses, step.reports


class _Step:
    """One rank's step: runs tasks, and keeps what its forwards saved for backwards that are still to come."""

    def __init__(
        self,
        schedule: Schedule,
        staged: StagedModel,
        p2p: P2P,
        microbatches: Sequence[tuple[Any, float]],
        loss: Loss,
        scale: Tensor,
        recording: Recording | None,
    ) -> None:
        self.stages, self.staged, self.p2p, self.microbatches = schedule.stages, staged, p2p, microbatches
        self.loss, self.scale, self.recording = loss, scale, recording
        self.live: dict[tuple[int, int], _Live] = {}
        self.losses: list[Tensor] = []
        self.reports: list[tuple[Collected, float]] = []

    def run(self, task: Task) -> None:
        need = need_of(task, self.stages)
        received = self.p2p.receive(need) if need is not None else None
        measured = self.recording.measure(task) if self.recording is not None else nullcontext()
        with measured, using_keys(self.microbatches[task.microbatch][0].get(KEYS)):
            if task.op == "F":
                self._forward(task, received)
            elif task.op in ("B", "I"):
                self._backward(task, received)
            if task.op in ("B", "W"):
                # The last use of the forward's state: popping it frees its graph, and the inputs of the deferred products.
                self.live.pop((task.stage, task.microbatch)).deferred.run()

    def _forward(self, task: Task, hidden: Tensor | None) -> None:
        if hidden is not None:
            # A leaf of this stage's own graph: backward stops here, and leaves the gradient for the stage before in `.grad`.
            hidden = hidden.detach().requires_grad_()
        microbatch, weight = self.microbatches[task.microbatch]
        with collect() as report:
            out = forward(self.staged, task.stage, hidden, microbatch, self.loss)
        self.reports.append((report, weight))
        # Weighted as the loss of its microbatch, so that routers learn the same however the batch is split.
        auxiliary = report.total() * weight / self.scale if report.losses else None
        if task.stage == self.stages - 1:
            # Detached: the list lasts to the end of the step, and would keep each microbatch's graph after its backward.
            self.losses.append(out.detach() * weight)
            out = out * weight / self.scale
        else:
            self.p2p.send(task, out.detach())
        # See [Note: a stage's output need not outlive its forward].
        roots = [get_gradient_edge(root) for root in (out, auxiliary) if root is not None and root.requires_grad]
        self.live[task.stage, task.microbatch] = _Live(hidden, roots)

    def _backward(self, task: Task, grad: Tensor | None) -> None:
        state = self.live[task.stage, task.microbatch]
        with defer_weight_gradients(state.deferred) if task.op == "I" else nullcontext():
            if not state.roots:
                return
            # One call for both roots, so that a node which both reach runs once, with the sum of their gradients. The
            # auxiliary loss is a scalar: its gradient, None here, is 1.
            torch.autograd.backward(state.roots, [grad, *[None] * (len(state.roots) - 1)])
        if state.hidden is not None:
            assert state.hidden.grad is not None
            self.p2p.send(output_of(task), state.hidden.grad)
        # The input and the graph are freed now, even where W is still to come: what it needs is in `deferred`.
        state.hidden = None
        state.roots = []
