"""Copies of experts (Hecate's sparse all-gather and reduce-scatter): weights to the ranks that a placement says, gradients
back to the owners. Copies live while they compute, in forward and again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshkit.core import _torch
from meshkit.core.waiting import waiting
from meshkit.parallel.expert._exchange import once
from meshkit.parallel.expert._placement import Placement

Run = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""(rows sorted by expert, copies of each parameter [copies, ...]) -> their output"""


class Arriving:
    """An all-to-all of whole experts that is under way. Owns its buffers until `wait`. Wire: one message for each dtype."""

    def __init__(self, stacks: Sequence[Tensor], sent: list[int], received: list[int], group: ProcessGroup) -> None:
        """stacks: of each parameter, [sent, ...], in the order of ranks."""
        self._shapes = [stack.shape[1:] for stack in stacks]
        self._keys = {
            dtype: [n for n, s in enumerate(stacks) if s.dtype == dtype] for dtype in {s.dtype: 0 for s in stacks}
        }
        self._under_way: list[tuple[dist.Work, Tensor, Tensor, list[int]]] = []
        for keys in self._keys.values():
            rows = torch.cat([stacks[key].flatten(1) for key in keys], 1)
            out = rows.new_empty(sum(received), rows.shape[1])
            work = dist.all_to_all_single(out, rows, received, sent, group=group, async_op=True)
            assert work is not None
            self._under_way.append((work, rows, out, keys))

    def wait(self) -> list[Tensor]:
        """Of each parameter [received, ...], in the order of ranks."""
        stacks: dict[int, Tensor] = {}
        for work, _, out, keys in self._under_way:
            with waiting("copies of experts of other ep ranks"):
                work.wait()
            ends = [0]
            for key in keys:
                ends.append(ends[-1] + prod(self._shapes[key]))
            for key, (start, stop) in zip(keys, pairwise(ends), strict=True):
                stacks[key] = out[:, start:stop].contiguous().view(len(out), *self._shapes[key])
        self._under_way = []
        return [stacks[key] for key in range(len(self._shapes))]


class Copies:
    """The copies of one layer under one placement, on this rank of ep.

    Source: Hecate 2025, section 4.1: sparse all-gather before, sparse reduce-scatter after; gathered again for backward.
    """

    def __init__(self, placement: Placement, group: ProcessGroup) -> None:
        self.placement, self.group, self.rank = placement, group, dist.get_rank(group)
        to_ranks = placement.sent(self.rank)
        # Where each expert that leaves lies in this rank's stacks, and those that arrive in the order of their owners.
        self.leaving = [placement.owned[self.rank].index(expert) for experts in to_ranks for expert in experts]
        self.sent = [len(experts) for experts in to_ranks]
        arriving = [
            [e for e in placement.copied[self.rank] if placement.owners[e] == r] for r in range(placement.ranks)
        ]
        self.received = [len(experts) for experts in arriving]
        by_owner = [expert for experts in arriving for expert in experts]
        self.order = [by_owner.index(expert) for expert in placement.copied[self.rank]]

    def gather(self, weights: Sequence[Tensor]) -> Arriving:
        """Start to bring copies to their ranks, an all-to-all over ep. weights: this rank's stacks of each parameter."""
        with torch.no_grad():
            return Arriving([_taken(weight, self.leaving) for weight in weights], self.sent, self.received, self.group)

    def wait(self, arriving: Arriving) -> list[Tensor]:
        """The copies, ascending by expert."""
        return [_taken(stack, self.order) for stack in arriving.wait()]

    def reduce(self, grads: Sequence[Tensor]) -> Arriving:
        """Start to bring gradients of copies to the owners. Wire: the all-to-all of `gather`, the other way."""
        by_owner = sorted(range(len(self.order)), key=self.order.__getitem__)
        return Arriving([_taken(grad, by_owner) for grad in grads], self.received, self.sent, self.group)

    def summed(self, arriving: Arriving, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """The sums of the gradients of this rank's experts, zeros for those without copies."""
        sums = []
        for grad, shape in zip(arriving.wait(), shapes, strict=True):
            wide = torch.promote_types(grad.dtype, torch.float32)  # an expert may have many copies
            total = torch.zeros(shape, dtype=wide, device=grad.device)
            for place, of_copy in zip(self.leaving, grad, strict=True):
                total[place] += of_copy
            sums.append(total.to(grad.dtype))
        return sums


def _taken(stack: Tensor, places: Sequence[int]) -> Tensor:
    """Some slices of a stack, in this order. They are few: an index would be a tensor more to bring to the device."""
    if list(places) == list(range(len(stack))):
        return stack
    return torch.stack([stack[place] for place in places]) if places else stack[:0]


class Copier:
    """One layer's copies from call to call: those that are on their way, and those that a block that runs again has left."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self.ahead: Arriving | None = None
        self._kept: list[Tensor] | None = None

    def begin(self, weights: Sequence[Tensor]) -> None:
        """Start a gather that the next `take` waits for. What an abandoned step has left is dropped."""
        self.drop()
        self.ahead = self.copies.gather(weights)

    def drop(self) -> None:
        if self.ahead is not None:
            self.ahead.wait()  # its buffers are being written
        self.ahead = self._kept = None

    def take(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The copies, ascending by expert."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return kept
        arriving, self.ahead = self.ahead or self.copies.gather(weights), None
        return self.copies.wait(arriving)

    def keep(self, copies: list[Tensor] | None) -> None:
        """Of a block that runs again: its backward, which is next, takes them. None: of no such block."""
        self._kept = copies


# [Note: copies are two autograd nodes]
# `_Arrive` hands the weights on to `_Compute` and does nothing forward. Backward runs the other way round: `_Compute` gathers
# the copies again, computes once more, goes backward through that, and starts the way back of the gradients; then the nodes
# in between run, the backward of this rank's own experts; then `_Arrive.backward` waits. What goes from one node to the other
# is a stand-in of the right shape. A `torch.utils.checkpoint` would not do: it computes again when a saved tensor is asked
# for, which a rank without copies never does, and the others would wait for it.


class Call:
    """One forward of a layer with copies, and its backward."""

    def __init__(self, copier: Copier, run: Run) -> None:
        self.copier, self.run = copier, run
        self.way_back: Arriving | None = None


def arrive(call: Call, weights: Sequence[Tensor]) -> list[Tensor]:
    """The weights as `compute_copies` is to have them. Call it before this rank's own experts compute."""
    handed: tuple[Tensor, ...] = _Arrive.apply(call, *weights)
    return list(handed)


def compute_copies(call: Call, rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The output of this rank's copies on their rows; a collective over ep. weights: of `arrive`."""
    out: Tensor = _Compute.apply(call, rows, *weights)
    return out


def when_over(x: Tensor, then: Callable[[], None]) -> Tensor:
    """x, in whose backward `then` runs: the backward of what is computed of it is over."""
    out: Tensor = _WhenOver.apply(x, then)
    return out


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.shapes = call, [weight.shape for weight in weights]
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    @once
    def backward(ctx: Any, *stand_ins: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        assert call.way_back is not None, "no gradients of copies are under way"
        sums = call.copier.copies.summed(call.way_back, ctx.shapes)
        call.way_back = None
        return None, *sums


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, rows: Tensor, *weights: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(rows, *weights)
        again = _torch.in_backward()
        if not again:
            call.copier.keep(None)  # an abandoned step may have left some
        copies = call.copier.take(weights)
        if again:
            call.copier.keep(copies)
        with torch.no_grad():
            return call.run(rows, copies)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        rows, *weights = ctx.saved_tensors
        copies, trains = call.copier.take(weights), any(ctx.needs_input_grad[2:])
        with torch.enable_grad():
            wanted = [rows.detach().requires_grad_()]
            copies = [copy.detach().requires_grad_(trains) for copy in copies]
            out = call.run(wanted[0], copies)
            wanted += copies if trains else []
            found = torch.autograd.grad(out, wanted, grad, allow_unused=True)
        row_grad, *grads = (
            torch.zeros_like(each) if each_grad is None else each_grad
            for each, each_grad in zip(wanted, found, strict=True)
        )
        if trains:
            call.way_back = call.copier.copies.reduce(grads)
        return None, row_grad, *(grad.new_zeros(()).expand(weight.shape) if trains else None for weight in weights)


class _WhenOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return grad, None
