"""Experts with many tokens go to the tokens: fully sharded sparse data parallelism."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshkit.moe.routing import Overlapped, Routing, combine, take_rows
from meshkit.parallel.expert._dispatch import AllToAll, Compute, experts_of, kept_pairs
from meshkit.parallel.expert._exchange import gather_rows
from meshkit.strategy import Capacity

_KEY = "_hot_experts"


class HotExperts:
    """A dispatcher of one layer that copies the experts expected to be busiest to every rank of ep, and sends the rest of the
    tokens by `AllToAll`.

    Which ones follows from the counts of the last steps, the same on every rank; the result does not depend on it. Each
    expert stays one rank's own, with its optimizer state; copies live while they compute, in forward and again in backward.
    Wire, per call: as `AllToAll` for the other tokens; an all-gather of the copied experts' weights in forward and one in
    backward, and a reduce-scatter of their gradients.
    Source: Hecate 2025, section 4: sparse all-gather and reduce-scatter, prediction by the mean of the last five steps.
    """

    def __init__(self, module: nn.Module, inner: AllToAll, count: int, history: int) -> None:
        """module: before anything else has changed its class."""
        self.plain, self.inner, self.count = type(module), inner, count
        self.recent: deque[list[int]] = deque(maxlen=history)

    @property
    def capacity(self) -> Capacity | None:
        return self.inner.capacity

    def note(self, counts: list[int]) -> None:
        """What each expert got in a step, over all ranks."""
        self.recent.append(counts)

    @property
    def chosen(self) -> list[int]:
        """The experts to copy, in ascending order; none before the first step."""
        totals = [sum(counts) for counts in zip(*self.recent, strict=True)]
        busiest = sorted(range(len(totals)), key=lambda expert: (-totals[expert], expert))
        return sorted(expert for expert in busiest[: self.count] if totals[expert])

    def run(
        self, module: nn.Module, x_NC: Tensor, routing: Routing, compute: Compute, meanwhile: Overlapped | None
    ) -> Tensor:
        """module: inside of its forward."""
        hot = self.chosen
        order_M, counts_E = kept_pairs(routing, self.inner.experts, self.capacity)
        plan = self.inner.plan(counts_E)
        own = plan.own
        order_M = order_M[: sum(own)]
        rows_MC = take_rows(x_NC, order_M, choices=routing.experts_NK.shape[-1])
        if not hot:
            return combine(self.inner.through(rows_MC, plan, compute, meanwhile), order_M, routing.weights_NK)
        places = torch.arange(len(order_M), device=order_M.device).split(own)
        here = _joined([places[expert] for expert in hot], order_M)
        away = _joined([place for expert, place in enumerate(places) if expert not in hot], order_M)
        sent = self.inner.through(rows_MC.index_select(0, away), plan.without(hot), compute, meanwhile)
        weights = {key: getattr(module, key) for key in module._parameters}
        kept: Tensor = checkpoint(
            self._run_copies, module, rows_MC.index_select(0, here), hot, own, weights, use_reentrant=False
        )
        return combine(torch.cat((sent, kept)), order_M.index_select(0, torch.cat((away, here))), routing.weights_NK)

    def _run_copies(
        self, module: nn.Module, rows: Tensor, hot: list[int], own: Sequence[int], weights: dict[str, Tensor]
    ) -> Tensor:
        group = self.inner.ep
        shares = self._shares(hot)
        mine = torch.tensor(shares[dist.get_rank(group)], dtype=torch.int64, device=rows.device)
        sizes = [len(share) for share in shares]
        copies = {
            key: gather_rows(weight.index_select(0, mine).flatten(1), sizes, group).unflatten(1, weight.shape[1:])
            for key, weight in weights.items()
        }
        # The module as it was, with copies for weights: neither views nor hooks of what has been done to it.
        stand_in: Any = self.plain.__new__(self.plain)
        stand_in.__dict__ = {**module.__dict__, "_parameters": copies}
        out: Tensor = stand_in.compute(rows, [own[expert] for expert in hot])
        return out

    def _shares(self, hot: list[int]) -> list[list[int]]:
        """Of each rank of ep: which of its own experts are copied, counted from its first."""
        ranks = self.inner.ep.size()
        held = [experts_of(self.inner.experts, ranks, rank) for rank in range(ranks)]
        return [[expert - own.start for expert in hot if expert in own] for own in held]


def _joined(pieces: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(pieces) if pieces else like.new_empty(0)


def set_hot(module: nn.Module, hot: HotExperts) -> None:
    module.__dict__[_KEY] = hot


def hot_of(module: nn.Module) -> HotExperts | None:
    found: HotExperts | None = module.__dict__.get(_KEY)
    return found


def note_counts(model: nn.Module, counts: dict[str, Tensor]) -> None:
    """Tell the layers that copy busy experts what each router beside them counted in a step. The host waits once."""
    wanting: list[tuple[HotExperts, str]] = []
    for name, module in model.named_modules():
        if (hot := hot_of(module)) is not None:
            around = name.rpartition(".")[0]
            wanting += [(hot, router) for router in counts if router.rpartition(".")[0] == around]
    if wanting:
        rows = torch.stack([counts[router] for _, router in wanting]).tolist()
        for (hot, _), row in zip(wanting, rows, strict=True):
            hot.note(row)
