"""The pipeline runtime: executes one rank's rows of a checked schedule, top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshkit.core import _torch
from meshkit.core.rng import KEYS, using_keys
from meshkit.core.sharding import plain_value
from meshkit.errors import PlanError, StepError
from meshkit.moe.aux_loss import Collected, collect
from meshkit.moe.real_tokens import no_real_tokens
from meshkit.parallel.pipeline._flow import Flow, Value
from meshkit.parallel.pipeline._p2p import P2P
from meshkit.parallel.pipeline._produced import Produced
from meshkit.parallel.pipeline._record import Recording
from meshkit.parallel.pipeline._split_backward import DeferredWeightGradients, defer_weight_gradients
from meshkit.parallel.pipeline._staged_model import OnAnotherRank, Running, StagedModel, refuse_other_arguments
from meshkit.parallel.pipeline._table import Schedule, Task, need_of, output_of
from meshkit.program import TensorRef

Loss = Callable[[Any, Any], Tensor]
Around = Callable[[int, int], AbstractContextManager[None]]


@dataclass
class _Live:
    """What a forward keeps for its backward."""

    received: list[Tensor]  # the received input of the stage: leaves, whose `.grad` go to the stage before
    # The roots of the stage's backward: its auxiliary losses and the loss, and what it hands on, which have a number in the
    # gradients that come back. None in a first stage that trains nothing.
    # [Note: a stage's output need not outlive its forward]
    # A GradientEdge refers to the node that made a tensor and not to the tensor, and backward needs no more. So the output's
    # memory is freed once it has been sent; a reference would keep one hidden state alive for each microbatch in flight.
    roots: list[tuple[GradientEdge, int | None]]
    deferred: DeferredWeightGradients = field(default_factory=DeferredWeightGradients)


class _StageOutput(Exception):
    """Raised to leave the loss function once the stage has its output: the rest of the function is the last stage's."""


class _StageModel:
    """The model that the loss function is given: calling it runs one stage."""

    def __init__(self, staged: StagedModel, stage: int, flow: Flow, received: Mapping[Value, Tensor]) -> None:
        self.staged, self.stage, self.flow, self.received = staged, stage, flow, received
        self.run: Running | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.run is not None:
            raise PlanError(
                "pipeline: the loss function calls its model twice, but a microbatch passes the stages once. Put both into "
                "one call, rows end to end, or use a mesh without pp."
            )
        refuse_other_arguments(self.flow, args, kwargs)
        # Left before `_StageOutput` is raised, so the model has all its modules again whatever the loss function does.
        with self.staged.running(self.stage, self.flow, self.received) as self.run:
            output = self.staged.model(*args, **kwargs)
        self.run.end()
        if self.stage == self.staged.stages.count - 1:
            return self._without_hidden(output)
        raise _StageOutput

    def _without_hidden(self, output: Any) -> Any:
        """What this stage cannot compute has no values. See `Flow.hidden`."""
        if not self.flow.hidden:
            return output
        empty = {
            key: _torch.tree_map(lambda leaf: self.staged.empty(leaf) if isinstance(leaf, TensorRef) else leaf, entry)
            for key, entry in self.flow.hidden.items()
        }
        if isinstance(output, MutableMapping):
            output = copy(output)
            for key, entry in empty.items():
                output[key] = entry
            return output
        entries = [empty.get(place, entry) for place, entry in enumerate(output)]
        return type(output)(*entries) if hasattr(output, "_fields") else type(output)(entries)

    # Loss functions read their model's config or call its head: whatever is not the forward is the model's own.
    def __getattr__(self, name: str) -> Any:
        return getattr(self.staged.model, name)


def forward(
    staged: StagedModel, stage: int, flow: Flow, received: Sequence[Tensor], microbatch: Any, loss: Loss
) -> tuple[Tensor | None, list[Tensor], list[GradientEdge | None]]:
    """Run one stage on a microbatch: returns the loss (in the last stage), what it hands on, and where in the graph.

    received: of the stage before on the microbatch's path. Where that is not the one before in the model, it is the hidden
    state in place of that one's: see `refuse_skips`.
    """
    given = dict(zip(flow.cuts[stage - 1] if stage else (), received, strict=True))
    if flow.writes_given:
        # Each stage of this rank does that again; and microbatches, which are parts of one tensor, count writes together.
        microbatch = _torch.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, microbatch)
    model = _StageModel(staged, stage, flow, given)
    try:
        with staged.in_loss(), _torch.before_backwards(partial(_refuse_across_stages, stage, received)):
            value = plain_value(loss(model, microbatch))
    except _StageOutput:
        run, values = model.run, flow.cuts[stage]
        assert run is not None
        return None, [run.handed[each] for each in values], [run.edges.get(each) for each in values]
    except OnAnotherRank as error:
        raise StepError(
            f"pipeline: the loss function reads a module of another stage: {error}. Return what it needs as the model's "
            "output, or use a mesh without pp."
        ) from error
    if model.run is None:
        raise PlanError("pipeline: the loss function did not call its model, so there is nothing to hand on.")
    if staged.has_values and any(_torch.is_fake(leaf) for leaf in _torch.tree_leaves(value)):
        raise StepError(
            "pipeline: the loss function reads something that has no values on the last stage: parameters of other stages, "
            "or a part of the model's output, of which only logits are sure to, plain or as `.logits`. Return what it needs "
            "as the output, leave a penalty on weights to the optimizer's weight_decay, or use a mesh without pp."
        )
    return value, [], []


def _refuse_across_stages(
    stage: int, received: Sequence[Tensor], roots: Sequence[Tensor], inputs: Sequence[Any]
) -> None:
    """Of a backward that a loss function runs: in the graph of a stage, what it received are leaves."""
    ends = set(map(id, received))
    if any(id(getattr(node, "variable", None)) in ends for node in _torch.nodes_run(roots)[0]):
        raise StepError(
            "pipeline: the loss function runs a backward of its own through the model (torch.autograd.grad, as for a "
            f"gradient penalty), and the graph of stage {stage} ends at what it received of the stage before. Use a "
            "mesh without pp."
        )


class _Called(Exception):
    """Raised to leave the loss function at its call of the model."""


class _Caller:
    """The model that the loss function is given to see what it calls the model with."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        raise _Called

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def arguments(model: nn.Module, microbatch: Any, loss: Loss) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the loss function calls the model with. Draws no random numbers.

    Raises: PlanError for a loss that draws some before: each stage would call the model with others.
    """
    caller = _Caller(model)
    tensors = [leaf for leaf in _torch.tree_leaves(microbatch) if isinstance(leaf, Tensor)]
    devices = {leaf.device for leaf in tensors if leaf.device.type not in ("cpu", "meta")}
    before = _random_states(devices)
    try:
        loss(caller, microbatch)
    except _Called:
        if any(not torch.equal(was, now) for was, now in zip(before, _random_states(devices), strict=True)):
            name = getattr(loss, "__name__", type(loss).__name__)
            raise PlanError(
                f"pipeline: the loss {name!r} draws random numbers before it calls the model, and each stage would draw "
                "others. Draw them before the step, into the batch "
                "(batch['noise'] = ...), where all stages have the same; or use a mesh without pp."
            ) from None
        return caller.args, caller.kwargs
    except OnAnotherRank as error:
        raise StepError(
            f"pipeline: the loss function reads a module of another stage: {error}. Call the model first, or use a mesh "
            "without pp."
        ) from error
    finally:
        torch.set_rng_state(before[0])
        for device, state in zip(devices, before[1:], strict=True):
            torch.get_device_module(device.type).set_rng_state(state, device)
    raise PlanError("pipeline: the loss function did not call its model, so there is nothing to hand on.")


def _random_states(devices: Iterable[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.get_device_module(each.type).get_rng_state(each) for each in devices)]


def execute(
    schedule: Schedule,
    rank: int,
    staged: StagedModel,
    p2p: P2P,
    microbatches: Sequence[tuple[Any, float]],
    flows: Sequence[Flow],
    loss: Loss,
    scale: Tensor,
    produced: Produced,
    recording: Recording | None = None,
    around: Around | None = None,
) -> tuple[list[Tensor], list[tuple[Collected, float]]]:
    """Run the forwards and backwards of all microbatches.

    Returns the losses, if the last stage is on this rank, and for each forward (report of its routers, weight of its loss);
    both in the order of the table.
    microbatches: (microbatch, weight of its loss). flows: of each microbatch. scale: losses are divided by it before their
    backward. produced: tells which values have a gradient. The two halves of an FB row run one after the other, with the
    messages of both under way. around(microbatch, place): entered around each task. place: forwards of all stages, then
    backwards from the last stage, then the rest of those that are split.
    """
    step = _Step(schedule, staged, p2p, microbatches, flows, loss, scale, produced, recording, around)
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
        flows: Sequence[Flow],
        loss: Loss,
        scale: Tensor,
        produced: Produced,
        recording: Recording | None,
        around: Around | None,
    ) -> None:
        self.schedule, self.staged, self.p2p, self.microbatches = schedule, staged, p2p, microbatches
        self.flows, self.loss, self.scale, self.produced = flows, loss, scale, produced
        self.recording, self.around = recording, around
        self.live: dict[tuple[int, int], _Live] = {}
        self.losses: list[Tensor] = []
        self.reports: list[tuple[Collected, float]] = []

    def run(self, task: Task) -> None:
        need = need_of(task, self.schedule)
        received = self.p2p.receive(need) if need is not None else []
        measured = self.recording.measure(task) if self.recording is not None else nullcontext()
        watched = nullcontext() if self.around is None else self.around(task.microbatch, _place(task, self.schedule))
        with measured, watched, using_keys(self.microbatches[task.microbatch][0].get(KEYS)):
            if task.op == "F":
                self._forward(task, received)
            elif task.op in ("B", "I"):
                self._backward(task, received)
            if task.op in ("B", "W"):
                # The last use of the forward's state: popping it frees its graph, and the inputs of the deferred products.
                self.live.pop((task.stage, task.microbatch)).deferred.run()

    def _forward(self, task: Task, received: list[Tensor]) -> None:
        # Leaves of this stage's own graph: backward stops here, and leaves the gradients for the stage before in `.grad`.
        received = [value.detach().requires_grad_(value.is_floating_point()) for value in received]
        microbatch, weight = self.microbatches[task.microbatch]
        with collect() as report, nullcontext() if weight else no_real_tokens():
            out, handed, edges = forward(
                self.staged, task.stage, self.flows[task.microbatch], received, microbatch, self.loss
            )
        self.reports.append((report, weight))
        # Weighted as the loss of its microbatch, so that routers learn the same however the batch is split.
        auxiliary = report.total() * weight / self.scale if report.losses else None
        if out is not None:
            # Detached: the list lasts to the end of the step, and would keep each microbatch's graph after its backward.
            self.losses.append(out.detach() * weight)
            out = out * weight / self.scale
        else:
            self.p2p.send(task, handed)
        # See [Note: a stage's output need not outlive its forward].
        # Gradients come back of what is floating, in its order.
        floating = [edge for edge, value in zip(edges, handed, strict=True) if value.is_floating_point()]
        roots: list[tuple[GradientEdge, int | None]] = [
            (edge, number) for number, edge in enumerate(floating) if edge is not None
        ]
        roots += [
            (get_gradient_edge(root), None) for root in (out, auxiliary) if root is not None and root.requires_grad
        ]
        self.live[task.stage, task.microbatch] = _Live(received, roots)

    def _backward(self, task: Task, grads: list[Tensor]) -> None:
        state = self.live[task.stage, task.microbatch]
        # See [Note: gradients that are not there].
        made = self.produced.asked(task.stage, task.microbatch, len(grads)) if grads else []
        roots = [(edge, number) for edge, number in state.roots if number is None or made[number]]
        with defer_weight_gradients(state.deferred) if task.op == "I" else nullcontext():
            if roots:
                # One call for all roots, so that a node which several reach runs once, with the sum of their gradients. A
                # loss is a scalar: its gradient, None here, is 1.
                torch.autograd.backward(
                    [edge for edge, _ in roots], [None if number is None else grads[number] for _, number in roots]
                )
        source = self.schedule.before(task.stage, task.microbatch)
        if source is not None:
            floating = [value for value in state.received if value.is_floating_point()]
            # Before they are sent: who waits for them goes on.
            self.produced.tell(source, task.microbatch, [value.grad is not None for value in floating])
            back = [torch.zeros_like(value) if value.grad is None else value.grad for value in floating]
            self.p2p.send(output_of(task), back)
        # The inputs and the graph are freed now, even where W is still to come: what it needs is in `deferred`.
        state.received, state.roots = [], []


def _place(task: Task, schedule: Schedule) -> int:
    """Of a task among those of its microbatch, in the order in which values pass the stages."""
    turn = schedule.paths[task.microbatch].index(task.stage)
    return turn if task.op == "F" else (3 if task.op == "W" else 2) * schedule.stages - turn
