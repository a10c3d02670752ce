"""Hot experts: copies of busy experts on the ranks that a placement says (FSSDP, fully sharded sparse data parallelism)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshkit.core import _torch
from meshkit.moe.routing import Overlapped, Routing
from meshkit.parallel.expert._choose import choose_copies
from meshkit.parallel.expert._copies import Call, Copier, Copies, arrive, compute_copies, when_over
from meshkit.parallel.expert._dispatch import AllToAll, Compute, DispatchPlan, nodes_of
from meshkit.parallel.expert._placement import Placement
from meshkit.parallel.tensor.local import inside_forward
from meshkit.strategy import ExpertPolicy

_KEY = "_hot_experts"


class HotExperts:
    """A dispatcher of one layer that follows its load: experts lie where `placement` says, and busy ones have copies.

    After each step copies are chosen by the rows of the last steps, see `choose_copies`; every rank of ep and etp has counted
    the same. Results do not depend on it. Each expert and its optimizer state belong to one rank: copies live only while they
    compute, in forward and again in backward. With etp a copy is of the features that a rank of etp computes with.
    Wire, per call: as `AllToAll`, with rows of copied experts shared among their holders; and of copies, over ep, an
    all-to-all of weights in forward, one in backward, and one of gradients. In a run those of forward begin before the
    block's attention, and those of backward before that of the block after it; see `begin_ahead`.
    Source: Hecate 2025, section 4; prediction by the mean of the last five steps.
    """

    def __init__(self, module: nn.Module, inner: AllToAll, policy: ExpertPolicy, sends_views: bool) -> None:
        """module: before any other patch of its class, so that experts compute with its plain class. sends_views: whether
        this rank's parts of parameters are put together by messages over etp, each time they are read."""
        self.plain, self.inner, self.policy, self.sends_views = type(module), inner, policy, sends_views
        self.nodes = nodes_of(inner.ep)
        self.recent: deque[list[int]] = deque(maxlen=policy.history)
        self.seen: list[int] | None = None  # of the step that runs
        self.before: Callable[[], None] | None = None  # begins what the block before this one needs in backward
        self.set_placement(expected_placement(policy, inner.experts, inner.ep.size(), self.nodes))

    def set_placement(self, placement: Placement) -> None:
        self.placement = placement
        self.copier = Copier(Copies(placement, self.inner.ep)) if placement.copies_made else None

    def set_owners(self, owners: Sequence[int]) -> None:
        """After their parameters have moved: the experts of a rank lie in ascending order."""
        self.set_placement(Placement(self.placement.ranks, tuple(owners), ((),) * self.inner.experts))
        self.choose()

    @property
    def rank(self) -> int:
        """Of ep."""
        return dist.get_rank(self.inner.ep)

    @property
    def home(self) -> Placement:
        """As the single-device model's order has it."""
        return Placement.contiguous(self.inner.experts, self.placement.ranks)

    @property
    def at_home(self) -> bool:
        return self.placement.owners == self.home.owners

    @property
    def totals(self) -> list[int]:
        """Rows of each expert in the last steps, of all ranks of ep and etp; before the first those that are expected, or
        zeros."""
        counted = [sum(counts) for counts in zip(*self.recent, strict=True)]
        return counted or list(self.policy.expected or [0] * self.inner.experts)

    def note(self, counts: Sequence[int]) -> None:
        """Remember the rows of each expert in a step, and choose the copies of the next; the same on every rank."""
        self.recent.append(list(counts))
        self.choose()

    def choose(self) -> None:
        """The copies of the next step; as long as nothing was counted, by the rows that are expected."""
        alone = self.placement.with_copies([()] * self.inner.experts)
        policy = self.policy
        self.set_placement(choose_copies(alone, self.totals, self.nodes, most=policy.copies, target=policy.target))

    def end_step(self) -> None:
        if self.seen is not None:
            self.recent.append(self.seen)
        self.seen = None

    def run(
        self, module: nn.Module, x_NC: Tensor, routing: Routing, compute: Compute, meanwhile: Overlapped | None
    ) -> Tensor:
        """Run tokens through their experts. Called inside of the module's forward, where its parameters are gathered."""
        if self.copier is not None and self.before is not None and x_NC.requires_grad:
            x_NC = when_over(x_NC, self.before)

        def compute_of(plan: DispatchPlan) -> Compute:
            if not _torch.is_fake(x_NC):  # choices without values are no load: what is expected stays so
                self._count(plan)
            return compute if self.copier is None else self._with_copies(module, self.copier)

        return self.inner.place(x_NC, routing, self.placement, compute_of, meanwhile)

    def _count(self, plan: DispatchPlan) -> None:
        """Of training alone, and once where a block runs again."""
        if torch.is_grad_enabled() and not _torch.in_backward():
            sources = [of_rank for of_ep in plan.counts for of_rank in of_ep]
            counts = [sum(column) for column in zip(*sources, strict=True)]
            self.seen = counts if self.seen is None else [a + b for a, b in zip(self.seen, counts, strict=True)]

    def _with_copies(self, module: nn.Module, copier: Copier) -> Compute:
        placement, rank = self.placement, copier.copies.rank
        own, copied = len(placement.owned[rank]), len(placement.copied[rank])

        def compute(rows: Tensor, counts: list[int]) -> Tensor:
            # Read once: a view may be a message. Inside of forward these are local shards, gathered by FSDP, into which the
            # gradients of copies flow back.
            weights = {key: getattr(module, key) for key in module._parameters}

            def run(rows: Tensor, copies: Sequence[Tensor]) -> Tensor:
                # A rank without copies takes part with no rows: the others wait for its messages.
                return (
                    self._computed(module, dict(zip(weights, copies, strict=True)), rows, counts[own:])
                    if copied
                    else rows
                )

            call = Call(copier, run)
            handed = arrive(call, list(weights.values()))
            own_rows, copy_rows = rows.split([sum(counts[:own]), sum(counts[own:])])
            own_out = self._computed(module, weights, own_rows, counts[:own])
            return torch.cat((own_out, compute_copies(call, copy_rows, handed)))

        return compute

    def _computed(self, module: nn.Module, weights: dict[str, Tensor], rows: Tensor, counts: list[int]) -> Tensor:
        # An instance of the plain class with these for parameters: it has neither the patched forward, which would dispatch
        # again, nor FSDP's hooks.
        stand_in: Any = self.plain.__new__(self.plain)
        stand_in.__dict__ = {**module.__dict__, "_parameters": weights}
        out: Tensor = stand_in.compute(rows, counts)
        return out

    def begin(self, module: nn.Module, *, anew: bool) -> None:
        """Start the gather of the copies of the next call, ahead of it. A collective over ep. anew: even if one is under way,
        which an abandoned step has left."""
        if self.copier is None or self.sends_views or (self.copier.ahead is not None and not anew):
            return
        if isinstance(module, FSDPModule):
            module.unshard()
        self.copier.begin([inside_forward(module, key).detach() for key in module._parameters])


def expected_placement(policy: ExpertPolicy, experts: int, ranks: int, nodes: Sequence[int]) -> Placement:
    """Of a run's first step."""
    alone = Placement.contiguous(experts, ranks)
    if policy.expected is None:
        return alone
    return choose_copies(alone, policy.expected, nodes, most=policy.copies, target=policy.target)


def begin_ahead(blocks: Sequence[Sequence[tuple[nn.Module, nn.Module]]]) -> None:
    """Start the gathers of copies before they are needed, in place. blocks: for each run of blocks that follow one another,
    (block, its experts) in order.

    Forward: when the block begins, so that its attention runs meanwhile. Backward: when that of the experts of the block
    after it is over, so that the attention's of that one does; the last block's when its backward begins.
    Call it after FSDP has its hooks: its gathers of the experts come first.
    """
    # A block that runs again in backward finds its copies under way, as it did in forward: selective recompute wants the
    # same operators, see [Note: gathers outside of recompute] in parallel/data.py.
    for following in blocks:
        before: Callable[[], None] | None = None
        for block, experts in following:
            hot = hot_experts_of(experts)
            if hot is None:
                before = None
                continue
            hot.before, before = before, partial(hot.begin, experts, anew=False)
            block.register_forward_pre_hook(_before_forward(partial(hot.begin, experts, anew=True)))
            block.register_forward_hook(_before_backward(before))


def _before_forward(begin: Callable[[], None]) -> Callable[..., None]:
    return torch.compiler.disable(lambda module, args: begin())  # type: ignore[no-any-return]  # torch has it untyped


def _before_backward(begin: Callable[[], None]) -> Callable[..., None]:
    def after(module: nn.Module, args: Any, out: Any) -> None:
        leaves = (leaf for leaf in _torch.tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad)
        if (hidden := next(leaves, None)) is not None:
            hidden.register_hook(lambda grad: begin())

    return torch.compiler.disable(after)  # type: ignore[no-any-return]  # same


def set_hot_experts(module: nn.Module, hot: HotExperts) -> None:
    module.__dict__[_KEY] = hot


def hot_experts_of(module: nn.Module) -> HotExperts | None:
    """Of a module of experts that follow their load; else None."""
    hot: HotExperts | None = module.__dict__.get(_KEY)
    return hot


def placements_of(model: nn.Module) -> dict[str, Placement] | None:
    """By module of experts, where its experts are now; None where none follow their load."""
    found = {name: hot_experts_of(module) for name, module in model.named_modules()}
    return {name: hot.placement for name, hot in found.items() if hot is not None} or None


def begin_step(model: nn.Module) -> None:
    """Before a step: what layers with hot experts have counted since the last, as in a step that failed, is none of it."""
    for hot in _all_of(model):
        hot.seen = None


def end_step(model: nn.Module) -> None:
    """After a step: layers with hot experts remember the rows that they have counted."""
    for hot in _all_of(model):
        hot.end_step()


def place_copies(model: nn.Module) -> None:
    """When no microbatch of the step runs again: layers with hot experts choose the copies of the next."""
    for hot in _all_of(model):
        hot.choose()


def _all_of(model: nn.Module) -> list[HotExperts]:
    return [hot for module in model.modules() if (hot := hot_experts_of(module)) is not None]
