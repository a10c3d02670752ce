"""Step trace: the memory of one microbatch of a thin model, cut into chunks at the edges of its blocks and units.

A chunk is what happens from one mark to the next. Marks are where a block or an FSDP unit begins and ends in forward and in
backward, and where the loss is known. Chunks of like blocks are alike, so those of a thin model make up any depth.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshkit._parallelize import execute
from meshkit.core import _torch
from meshkit.core._torch import tree_leaves
from meshkit.core.sharding import local_tensor
from meshkit.mask import Mask
from meshkit.preflight._arguments import full_coordinate
from meshkit.preflight._first_step import after_first
from meshkit.preflight._inner import inner_mesh, inner_strategy
from meshkit.preflight._moved import WatchedTier, watch_offload
from meshkit.preflight._thin import step_program
from meshkit.preflight.estimate._estimate import (
    CUDA_GRANULE,
    Kernels,
    count_parameters,
    fake_mesh,
)
from meshkit.preflight.estimate._tracker import FORWARD_BACKWARD, GROUPS, Change, Tracker
from meshkit.resolve import Resolved, resolve
from meshkit.step import Loss

Edge = Literal["start", "enter", "leave", "loss", "backward", "done", "end"]
"""start: of the microbatch; enter, leave: a module in forward; loss: it is known; backward, done: a module's backward"""

FSDP_GROUPS = (GROUPS.index("gathered parameters"), GROUPS.index("gradients in reduction"))


@dataclass(frozen=True)
class Mark:
    edge: Edge
    module: str


@dataclass(frozen=True)
class Accumulated:
    """The gradient of a parameter is there, in this storage: from here on it is added to what was accumulated before."""

    storage: int
    param: str


@dataclass(frozen=True, eq=False)
class Chunk:
    """From a mark to the next. changes: of storages other than gradients of parameters, and where these are complete.

    Gradients' own storages are in `grads`, so that what becomes of them can differ: see `_replay`.
    """

    mark: Mark
    changes: tuple[Change | Accumulated, ...]


@dataclass(frozen=True, eq=False)
class StepTrace:
    """grads: storage of a gradient -> its parameter; born: the change that made it; made_of: storages it was computed of.

    hidden: block -> the storage of its input; output: that of its output; incoming: that of its gradient. moved: block ->
    storages that are offloaded in its forward; fetched: those that they come back to; stored_bytes: what they take elsewhere.
    """

    chunks: tuple[Chunk, ...]
    grads: Mapping[int, str]
    born: Mapping[int, Change]
    made_of: Mapping[int, tuple[int, ...]]
    hidden: Mapping[str, int]
    incoming: Mapping[str, int]
    output: Mapping[str, int] = field(default_factory=dict)
    moved: Mapping[str, frozenset[int]] = field(default_factory=dict)
    fetched: Mapping[str, frozenset[int]] = field(default_factory=dict)
    stored_bytes: Mapping[str, int] = field(default_factory=dict)


def trace_step(
    resolved: Resolved,
    kinds: Mapping[str, str],
    *,
    tied: Sequence[tuple[str, str]],
    rows: int,
    seq_len: int,
    mask: Mask | Sequence[Mask] | None,
    loss: Loss,
    kernels: Kernels,
) -> StepTrace:
    """One microbatch of [rows, seq_len], before cp splits it, through a thin copy with one block of each kind.

    tied: parameters that stages of a pipeline use each in a backward of its own, as if they were two.
    """
    spec = inner_mesh(resolved.spec)
    strategy = inner_strategy(resolved, spec, set(kinds.values()))
    program = step_program(resolved, kinds, strategy, tied=tied)
    batch = {name: torch.zeros(rows, seq_len, dtype=torch.int64) for name in ("input_ids", "labels")}
    model = copy.deepcopy(program.model)
    with fake_mesh(spec, full_coordinate(spec, None), kernels=kernels) as mesh:
        inner = resolve(program, strategy, spec, device_type=mesh.device.type)
        run = execute(model, mesh, inner)
        run.trusts_losses = True
        _torch.gather_once(run.model)
        units = run.resolved.units_of(0)
        marked = _Marked(loss)

        def traced() -> tuple[StepTrace, WatchedTier | None]:
            tracker = Tracker(
                run.model,
                [*run.blocks, *units],
                head=units[-1] if units else "",
                device=mesh.device,
                granule=CUDA_GRANULE if kernels == "cuda" else 1,
                inputs=True,
            )
            watched = watch_offload(run, resolved, tracker.number_of)
            with tracker:
                count_parameters(tracker, run.model)
                with _marks(tracker, run.model, [*run.blocks, *units], marked) as marks:
                    tracker.start(FORWARD_BACKWARD)
                    run.forward_backward(batch, mask=mask, loss=marked, step=1)
            return _cut(tracker, marks), watched

        trace, watched = after_first(run.model, traced)
        if watched is None:
            return trace
        return replace(
            trace,
            moved={name: frozenset(each) for name, each in watched.out.items()},
            fetched={name: frozenset(each) for name, each in watched.back.items()},
            stored_bytes=watched.pieces,
        )


class _Marked:
    """A loss that says when it is known."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.known: Any = None

    def __call__(self, model: Any, batch: Any) -> Tensor:
        value = self.loss(model, batch)
        if self.known is not None:
            self.known()
        return value


@dataclass(eq=False)
class _Marks:
    """at: index of a change -> what stands before it, in order."""

    tracker: Tracker
    at: list[tuple[int, Mark | Accumulated]] = field(default_factory=list)
    hidden: dict[str, int] = field(default_factory=dict)
    incoming: dict[str, int] = field(default_factory=dict)
    output: dict[str, int] = field(default_factory=dict)

    def add(self, edge: Edge, module: str) -> None:
        self.at.append((len(self.tracker.changes), Mark(edge, module)))

    def done(self, module: str) -> None:
        """Before the mark of the module whose output is its input: hooks of both are on one gradient."""
        position = len(self.tracker.changes)
        at = len(self.at)
        while at and self.at[at - 1][0] == position and self._is_backward(at - 1):
            at -= 1
        self.at.insert(at, (position, Mark("done", module)))

    def _is_backward(self, at: int) -> bool:
        mark = self.at[at][1]
        return isinstance(mark, Mark) and mark.edge == "backward"

    def accumulated(self, param: Tensor, name: str) -> None:
        if param.grad is None:
            return
        local = local_tensor(param.grad)
        number = self.tracker.number_of(local)
        if number is not None:
            self.at.append((len(self.tracker.changes), Accumulated(number, name)))


@contextmanager
def _marks(tracker: Tracker, model: nn.Module, modules: Sequence[str], loss: _Marked) -> Iterator[_Marks]:
    marks = _Marks(tracker)
    marks.add("start", "")
    open_backward: list[str] = []

    def ends(name: str) -> Any:
        def hook(grad: Tensor) -> None:
            if name in open_backward:
                open_backward.remove(name)
                marks.done(name)

        return hook

    def begins(name: str) -> Any:
        def hook(grad: Tensor) -> None:
            if name not in open_backward:
                open_backward.append(name)
                marks.add("backward", name)
                if (number := tracker.number_of(local_tensor(grad))) is not None:
                    marks.incoming[name] = number

        return hook

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if _torch.in_backward():
                return
            marks.add("enter", name)
            value = _trained((args, kwargs))
            if value is not None:
                value.register_hook(ends(name))
                if (number := tracker.number_of(local_tensor(value))) is not None:
                    marks.hidden[name] = number

        return hook

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if _torch.in_backward():
                return
            marks.add("leave", name)
            value = _trained(out)
            if value is not None:
                value.register_hook(begins(name))
                if (number := tracker.number_of(local_tensor(value))) is not None:
                    marks.output[name] = number

        return hook

    with ExitStack() as stack:
        for name in ("", *modules):
            module = model.get_submodule(name)
            for handle in (
                module.register_forward_pre_hook(enter(name), with_kwargs=True),
                module.register_forward_hook(leave(name)),
            ):
                stack.callback(handle.remove)
        unsharded = _torch.unsharded_parameters(model)
        for name, param in model.named_parameters():
            watched = unsharded.get(name, param)
            if watched.requires_grad:
                handle = watched.register_post_accumulate_grad_hook(
                    lambda param, name=name: marks.accumulated(param, name)
                )
                stack.callback(handle.remove)
        loss.known = lambda: marks.add("loss", "")
        stack.callback(setattr, loss, "known", None)
        yield marks
    marks.add("end", "")


def _trained(values: Any) -> Tensor | None:
    return next((leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad), None)


def _cut(tracker: Tracker, marks: _Marks) -> StepTrace:
    at = marks.at
    # What FSDP gathers and reduces here depends on the data axes, so it is walked and not traced.
    of_fsdp = {change.storage for change in tracker.changes if change.group in FSDP_GROUPS}
    grads = {each.storage: each.param for _, each in at if isinstance(each, Accumulated)}
    chunks: list[Chunk] = []
    current: list[Change | Accumulated] = []
    mark, index = Mark("start", ""), at[0][0]
    for position, each in at[1:]:
        current += [change for change in tracker.changes[index:position] if change.storage not in of_fsdp]
        index = position
        if isinstance(each, Accumulated):
            current.append(each)
        else:
            chunks.append(Chunk(mark, tuple(current)))
            mark, current = each, []
    made_of = {grad: tracker.made_of.get(grad, ()) for grad in grads}
    born: dict[int, Change] = {}
    for change in tracker.changes:
        if change.storage in grads:
            born.setdefault(change.storage, change)
    return StepTrace(tuple(chunks), grads, born, made_of, marks.hidden, marks.incoming, marks.output)
