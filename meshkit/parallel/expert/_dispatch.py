"""Tokens to the ranks that hold their experts, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core import _torch
from meshkit.core.sharding import chunk
from meshkit.moe.aux_loss import report_dropped
from meshkit.moe.routing import Overlapped, Routing, combine, sort_by_expert, take_rows
from meshkit.parallel.expert._exchange import exchange, gather_rows, scatter_sum_rows
from meshkit.strategy import Capacity

Compute = Callable[[Tensor, list[int]], Tensor]
"""The held experts on rows [M, C] sorted by expert, and how many rows each has; returns [M, C]."""


class Dispatcher(Protocol):
    """How tokens find their experts. Another library's goes in by this signature; `conformance` tests any."""

    def __call__(self, x_NC: Tensor, routing: Routing, compute: Compute) -> Tensor:
        """This rank's tokens through their experts, wherever those are: [N, C], summed in the dtype of the weights.

        A collective of the ranks that share the experts. Ranks may have different numbers of tokens, and none.
        """
        ...


@dataclass(frozen=True)
class OneRank:
    """All experts are here."""

    experts: int
    capacity: Capacity | None = None

    def __call__(self, x_NC: Tensor, routing: Routing, compute: Compute) -> Tensor:
        order_M, counts_E = kept_pairs(routing, self.experts, self.capacity)
        counts = counts_E.tolist()
        order_M = order_M[: sum(counts)]
        rows_MC = take_rows(x_NC, order_M, choices=routing.experts_NK.shape[-1])
        return combine(compute(rows_MC, counts), order_M, routing.weights_NK)


def experts_of(experts: int, ranks: int, rank: int) -> range:
    """The experts of one of the ranks that share them, as DTensor shards them."""
    part = chunk(experts, ranks, rank)
    return range(part.start, part.stop)


@dataclass(frozen=True)
class Sent:
    """How many rows go where, known on every rank of ep x etp once their counts are. counts[i][j][e] are the pairs of
    expert e on the rank with place i on ep and j on etp.
    """

    counts: list[list[list[int]]]
    place: tuple[int, int]

    @property
    def ranks(self) -> tuple[int, int]:
        return len(self.counts), len(self.counts[0])

    @property
    def own(self) -> list[int]:
        """Pairs of this rank that stay, for each expert."""
        return self.counts[self.place[0]][self.place[1]]

    def experts_of(self, rank: int) -> range:
        """The experts of one place on ep."""
        return experts_of(len(self.counts[0][0]), self.ranks[0], rank)

    def sent(self) -> list[int]:
        """Rows of this rank for each place on ep."""
        return [sum(self.own[expert] for expert in self.experts_of(rank)) for rank in range(self.ranks[0])]

    def received(self, etp: int | None = None) -> list[int]:
        """Rows that a rank of our place on ep gets from each place on ep; etp: which one, default this rank."""
        j = self.place[1] if etp is None else etp
        experts = self.experts_of(self.place[0])
        return [sum(source[j][expert] for expert in experts) for source in self.counts]

    def gathered(self) -> list[int]:
        """Rows that each place on etp has after the exchange."""
        return [sum(self.received(etp)) for etp in range(self.ranks[1])]

    def runs(self) -> list[int]:
        """Lengths of the runs of rows of one expert, in the order in which rows lie after gathering over etp."""
        experts = self.experts_of(self.place[0])
        return [source[j][expert] for j in range(self.ranks[1]) for source in self.counts for expert in experts]

    def without(self, experts: Iterable[int]) -> Sent:
        """As if nobody sent anything to these experts."""
        apart = set(experts)
        kept = [
            [[0 if expert in apart else count for expert, count in enumerate(own)] for own in sources]
            for sources in self.counts
        ]
        return Sent(kept, self.place)

    def per_expert(self) -> list[int]:
        """Rows of each of our experts."""
        experts = self.experts_of(self.place[0])
        return [sum(source[expert] for sources in self.counts for source in sources) for expert in experts]


@dataclass(frozen=True)
class AllToAll:
    """Rows go to their experts over `ep`, and over `etp` to the ranks that hold the other features of those experts.

    Shared experts run while rows are on their way there, and in backward while gradients are on their way back.
    Wire, per call: an all-gather of E counts from each rank, which the host waits for, once; the rows by all-to-all over ep,
    there and back, and over etp an all-gather and a reduce-scatter; backward the same without the counts.
    Source: Lepikhin et al. 2020, section 3; no capacity: Gale et al. 2022.
    """

    experts: int
    both: ProcessGroup
    """ranks of ep x etp, etp fastest"""
    ep: ProcessGroup
    etp: ProcessGroup | None = None
    """None: each expert is whole on its rank"""
    capacity: Capacity | None = None

    @classmethod
    def on(cls, experts: int, mesh: DeviceMesh, capacity: Capacity | None = None) -> Self:
        """mesh: one axis, ep, or two, ep x etp. A collective of its ranks the first time, where both are larger than 1."""
        if mesh.ndim == 1:
            return cls(experts, mesh.get_group(), mesh.get_group(), capacity=capacity)
        large = [dim for dim in range(2) if mesh.size(dim) > 1]
        names = mesh.mesh_dim_names or ("ep", "etp")
        both = mesh.get_group(large[0] if large else 0)
        if len(large) > 1:
            both = _torch.flatten_mesh(mesh, "_".join(names)).get_group()
        return cls(experts, both, mesh.get_group(0), mesh.get_group(1), capacity)

    def __call__(self, x_NC: Tensor, routing: Routing, compute: Compute, meanwhile: Overlapped | None = None) -> Tensor:
        order_M, counts_E = kept_pairs(routing, self.experts, self.capacity)
        plan = self.plan(counts_E)
        order_M = order_M[: sum(plan.own)]
        rows_MC = take_rows(x_NC, order_M, choices=routing.experts_NK.shape[-1])
        return combine(self.through(rows_MC, plan, compute, meanwhile), order_M, routing.weights_NK)

    def through(self, rows: Tensor, plan: Sent, compute: Compute, meanwhile: Overlapped | None = None) -> Tensor:
        """Rows of this rank, sorted by expert, to their experts and back."""
        rows = exchange(rows, plan.sent(), plan.received(), self.ep, meanwhile)
        if self.etp is not None:
            rows = gather_rows(rows, plan.gathered(), self.etp)
        order = _by_expert(plan.runs(), len(plan.per_expert()), rows.device)
        out = compute(rows.index_select(0, order), plan.per_expert())
        out = out.index_select(0, order.argsort())
        if self.etp is not None:
            out = scatter_sum_rows(out, plan.gathered(), self.etp)
        return exchange(out, plan.received(), plan.sent(), self.ep)

    def plan(self, counts_E: Tensor) -> Sent:
        """Wire: an all-gather of E counts. The one time that the host waits."""
        ep, etp = self.ep.size(), 1 if self.etp is None else self.etp.size()
        everybody = counts_E.new_empty(ep * etp, self.experts)
        dist.all_gather_into_tensor(everybody, counts_E.unsqueeze(0), group=self.both)
        place = divmod(dist.get_rank(self.both), etp)
        return Sent(everybody.unflatten(0, (ep, etp)).tolist(), place)


def kept_pairs(routing: Routing, experts: int, capacity: Capacity | None) -> tuple[Tensor, Tensor]:
    """(pairs in the order of their experts, those that stay first, how many stay of each expert)."""
    order_M, counts_E = sort_by_expert(routing.experts_NK, experts)
    if capacity is None:
        return order_M, counts_E
    order_M, kept_E = keep_within(capacity, routing, order_M, counts_E)
    report_dropped(len(order_M) - kept_E.sum(), len(order_M))
    return order_M, kept_E


def _by_expert(runs: list[int], experts: int, device: torch.device) -> Tensor:
    """The order by expert of rows that lie in runs of one expert each: `experts` runs from each source."""
    ids = torch.arange(experts, device=device).repeat(len(runs) // max(experts, 1))
    lengths = torch.tensor(runs, dtype=torch.int64).to(device, non_blocking=True)
    return ids.repeat_interleave(lengths, output_size=sum(runs)).argsort(stable=True)


# Which (token, choice) pairs an expert takes when it takes only so many.


def keep_within(capacity: Capacity, routing: Routing, order_M: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    """(the pairs of `sort_by_expert` in its order, those that stay first, how many stay of each expert).

    How many stay in all is in the counts: the host need not wait here.
    """
    pairs, experts = len(order_M), len(counts_E)
    limit = ceil(capacity.factor * pairs / experts)
    place_M = torch.arange(pairs, device=order_M.device)
    first_M = (counts_E.cumsum(0) - counts_E).repeat_interleave(counts_E, output_size=pairs)
    rank_M = place_M - first_M  # among the pairs of the same expert
    if capacity.drop == "probability":
        weights_M = routing.weights_NK.detach().flatten()[order_M]
        expert_M = routing.experts_NK.flatten()[order_M]
        by_weight = weights_M.argsort(descending=True, stable=True)
        by_expert = by_weight[expert_M[by_weight].argsort(stable=True)]
        rank_M = torch.empty_like(place_M).scatter_(0, by_expert, rank_M)
    return order_M[(rank_M >= limit).to(torch.uint8).argsort(stable=True)], counts_E.clamp(max=limit)
