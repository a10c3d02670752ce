"""Hot experts: copies of busy experts go to the tokens (load balancing by fully sharded sparse data parallelism)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshkit.core.to_device import tensor_on
from meshkit.moe.routing import Overlapped, Routing, combine, take_rows
from meshkit.parallel.expert._dispatch import AllToAll, Compute, experts_of, kept_pairs
from meshkit.parallel.expert._exchange import gather_rows
from meshkit.strategy import Capacity

_KEY = "_hot_experts"


class HotExperts:
    """A dispatcher that copies the experts of one layer expected to be busiest to every rank of ep.

    Tokens of the other experts are sent by `AllToAll`. The choice follows from the counts of the last steps, the same on
    every rank; results do not depend on it. Each expert and its optimizer state still belong to one rank: copies live only
    while they compute, in forward and again in backward.
    Wire, per call: as `AllToAll` for the other tokens; an all-gather of the copied experts' weights in forward and one in
    backward, and a reduce-scatter of their gradients.
    Source: Hecate 2025, section 4: sparse all-gather and reduce-scatter, prediction by the mean of the last five steps.
    """

    def __init__(self, module: nn.Module, inner: AllToAll, count: int, history: int) -> None:
        """module: before any other patch of its class, so that copies compute with its plain class."""
        self.plain, self.inner, self.count = type(module), inner, count
        self.recent: deque[list[int]] = deque(maxlen=history)

    @property
    def capacity(self) -> Capacity | None:
        return self.inner.capacity

    def note(self, counts: list[int]) -> None:
        """Remember the tokens of each expert in a step, summed over all ranks."""
        self.recent.append(counts)

    @property
    def chosen(self) -> list[int]:
        """The experts to copy, in ascending order; none before the first step."""
        totals = [sum(counts) for counts in zip(*self.recent, strict=True)]
        # Ties by number, and copies in ascending order, since rows come sorted by expert.
        busiest = sorted(range(len(totals)), key=lambda expert: (-totals[expert], expert))
        return sorted(expert for expert in busiest[: self.count] if totals[expert])

    def run(
        self, module: nn.Module, x_NC: Tensor, routing: Routing, compute: Compute, meanwhile: Overlapped | None
    ) -> Tensor:
        """Run tokens through their experts. Called inside of the module's forward, where its parameters are gathered."""
        # The same on every rank, since `recent` has counts summed over all ranks: the all-gather below needs all of them.
        hot = self.chosen
        order_M, counts_E = kept_pairs(routing, self.inner.experts, self.capacity)
        plan = self.inner.plan(self.inner.gather_counts(counts_E))
        counts = plan.local_counts
        order_M = order_M[: sum(counts)]
        rows_MC = take_rows(x_NC, order_M, choices=routing.experts_NK.shape[-1])
        if not hot:
            return combine(self.inner.send_and_compute(rows_MC, plan, compute, meanwhile), order_M, routing.weights_NK)
        rows_of = torch.arange(len(order_M), device=order_M.device).split(counts)
        hot_rows = _joined([rows_of[expert] for expert in hot], order_M)
        other_rows = _joined([rows for expert, rows in enumerate(rows_of) if expert not in hot], order_M)
        other_out = self.inner.send_and_compute(
            rows_MC.index_select(0, other_rows), plan.without(hot), compute, meanwhile
        )
        # Inside of forward these are local shards, gathered by FSDP: gradients of copies flow back into them.
        weights = {key: getattr(module, key) for key in module._parameters}
        # Activation checkpointing: the copies are freed after forward, and gathered again for backward.
        hot_out: Tensor = checkpoint(
            self._run_copies, module, rows_MC.index_select(0, hot_rows), hot, counts, weights, use_reentrant=False
        )
        order_M = order_M.index_select(0, torch.cat((other_rows, hot_rows)))
        return combine(torch.cat((other_out, hot_out)), order_M, routing.weights_NK)

    def _run_copies(
        self, module: nn.Module, rows: Tensor, hot: list[int], counts: Sequence[int], weights: dict[str, Tensor]
    ) -> Tensor:
        group = self.inner.ep
        shares = self._shares(hot)
        local_hot = tensor_on(shares[dist.get_rank(group)], rows.device)
        sizes = [len(share) for share in shares]
        # An autograd-aware gather: its backward reduce-scatters the copies' gradients to the experts' own ranks.
        copies = {
            key: gather_rows(rearrange(weight.index_select(0, local_hot), "e ... -> e (...)"), sizes, group).unflatten(
                1, weight.shape[1:]
            )
            for key, weight in weights.items()
        }
        # An instance of the plain class with the copies for parameters: it has neither the patched forward, which would
        # dispatch again, nor FSDP's hooks.
        stand_in: Any = self.plain.__new__(self.plain)
        stand_in.__dict__ = {**module.__dict__, "_parameters": copies}
        out: Tensor = stand_in.compute(rows, [counts[expert] for expert in hot])
        return out

    def _shares(self, hot: list[int]) -> list[list[int]]:
        """For each rank of ep, which of its experts are copied, counted from its first expert."""
        ranks = self.inner.ep.size()
        experts_by_rank = [experts_of(self.inner.experts, ranks, rank) for rank in range(ranks)]
        return [[expert - local.start for expert in hot if expert in local] for local in experts_by_rank]


def _joined(pieces: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(pieces) if pieces else like.new_empty(0)


def set_hot_experts(module: nn.Module, hot: HotExperts) -> None:
    module.__dict__[_KEY] = hot


def hot_experts_of(module: nn.Module) -> HotExperts | None:
    hot: HotExperts | None = module.__dict__.get(_KEY)
    return hot


def note_counts(model: nn.Module, counts: dict[str, Tensor]) -> None:
    """Give each layer with hot experts the step's counts of the router in the same block. The host waits once."""
    wanting: list[tuple[HotExperts, str]] = []
    for name, module in model.named_modules():
        if (hot := hot_experts_of(module)) is not None:
            parent = name.rpartition(".")[0]
            wanting += [(hot, router) for router in counts if router.rpartition(".")[0] == parent]
    if wanting:
        rows = torch.stack([counts[router] for _, router in wanting]).tolist()
        for (hot, _), row in zip(wanting, rows, strict=True):
            hot.note(row)
