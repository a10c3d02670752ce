"""Token dispatch of mixture-of-experts: the expert all-to-all, with and without a capacity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core import _torch
from meshkit.core.sharding import chunk
from meshkit.core.to_device import copy_to_host, tensor_on
from meshkit.mesh.world import ranks_per_node
from meshkit.moe.aux_loss import report_dropped
from meshkit.moe.routing import Overlapped, Routing, combine, sort_by_expert, take_rows
from meshkit.parallel.expert._exchange import exchange, gather_rows, scatter_sum_rows
from meshkit.parallel.expert._placement import Placement
from meshkit.parallel.expert._shares import Shares, share_rows
from meshkit.strategy import Capacity

Compute = Callable[[Tensor, Any], Tensor]
"""(rows [M, C] sorted by expert, row count of each local expert) -> the experts' output [M, C].

The counts are a list, or of `PaddedAllToAll` a tensor on the device, whose sum may be less than M.
"""


class Dispatcher(Protocol):
    """Sends tokens to their experts and results back. Another library's fits this signature; `conformance` tests any."""

    def __call__(self, x_NC: Tensor, routing: Routing, compute: Compute) -> Tensor:
        """Run this rank's tokens through their experts, on whatever rank: [N, C], summed in the dtype of the weights.

        A collective of the ranks that share the experts. Ranks may have different numbers of tokens, and none.
        """
        ...


@dataclass(frozen=True)
class OneRank:
    """The dispatcher where this rank holds all experts: rows are sorted, nothing is sent."""

    experts: int
    capacity: Capacity | None = None

    def __call__(self, x_NC: Tensor, routing: Routing, compute: Compute) -> Tensor:
        order_M, counts_E = kept_pairs(routing, self.experts, self.capacity)
        on_host = copy_to_host(counts_E)
        rows_MC = take_rows(x_NC, order_M, choices=routing.experts_NK.shape[-1])  # while the counts come to the host
        counts = on_host().tolist()
        order_M, rows_MC = _without_dropped(order_M, rows_MC, sum(counts))
        return combine(compute(rows_MC, counts), order_M, routing.weights_NK)


def experts_of(experts: int, ranks: int, rank: int) -> range:
    """The experts of one rank, in the shares in which DTensor shards a dim."""
    shard = chunk(experts, ranks, rank)
    return range(shard.start, shard.stop)


@dataclass(frozen=True)
class DispatchPlan:
    """How many rows each rank sends to each other. Every rank of ep x etp has the same counts, so no sizes are negotiated.

    counts[i][j][e]: (token, choice) pairs for expert e on the rank at coordinate (i, j) of ep x etp.
    coordinate: of this rank. placement: None for equal runs of experts. nodes: for each rank of ep; None for one node.
    """

    counts: list[list[list[int]]]
    coordinate: tuple[int, int]
    placement: Placement | None = None
    nodes: tuple[int, ...] | None = None

    @property
    def ranks(self) -> tuple[int, int]:
        return len(self.counts), len(self.counts[0])

    @property
    def local_counts(self) -> list[int]:
        """Pairs of this rank, for each expert."""
        return self.counts[self.coordinate[0]][self.coordinate[1]]

    @cached_property
    def table(self) -> Placement:
        return self.placement or Placement.contiguous(len(self.counts[0][0]), self.ranks[0])

    @cached_property
    def shares(self) -> Shares:
        """Of copied experts; sources are in the order of ep x etp, etp fastest."""
        sources = [of_rank for of_ep in self.counts for of_rank in of_ep]
        return share_rows(self.table, sources, self.nodes or (0,) * self.ranks[0], self.ranks[1])

    def rows(self, source: tuple[int, int], rank: int) -> list[int]:
        """Rows that a rank at this coordinate sends to a rank of ep, of each expert there."""
        i, j = source
        of_source, index = self.counts[i][j], i * self.ranks[1] + j
        return [
            self.shares[expert][index][self.table.holders[expert].index(rank)]
            if expert in self.shares
            else of_source[expert]
            for expert in self.table.on[rank]
        ]

    def sent(self) -> list[int]:
        """Rows that this rank sends to each rank of ep."""
        return [sum(self.rows(self.coordinate, rank)) for rank in range(self.ranks[0])]

    def received(self, etp: int | None = None) -> list[int]:
        """Rows that arrive from each rank of ep. etp: at which of this rank's peers on etp; default: at this rank."""
        j = self.coordinate[1] if etp is None else etp
        return [sum(self.rows((i, j), self.coordinate[0])) for i in range(self.ranks[0])]

    def gathered(self) -> list[int]:
        """Rows that each rank of etp has after the all-to-all."""
        return [sum(self.received(etp)) for etp in range(self.ranks[1])]

    def runs(self) -> list[int]:
        """Lengths of the runs of rows of one expert, in the order of the rows after the gather over etp."""
        sources = [(i, j) for j in range(self.ranks[1]) for i in range(self.ranks[0])]
        return [count for source in sources for count in self.rows(source, self.coordinate[0])]

    def per_expert(self) -> list[int]:
        """Rows of each expert that this rank computes, from all ranks."""
        experts, runs = len(self.table.on[self.coordinate[0]]), self.runs()
        return [sum(runs[place::experts]) for place in range(experts)]

    def segments(self) -> tuple[list[int], list[int]]:
        """(first rows, lengths) in rows that are sorted by expert, in the order in which this rank sends them."""
        first = [end - count for end, count in zip(accumulate(self.local_counts), self.local_counts, strict=True)]
        starts, lengths = [], []
        for rank in range(self.ranks[0]):
            for expert, count in zip(self.table.on[rank], self.rows(self.coordinate, rank), strict=True):
                starts.append(first[expert])
                lengths.append(count)
                first[expert] += count  # what is left is for the next holder
        return starts, lengths


@dataclass(frozen=True)
class AllToAll:
    """The expert all-to-all: rows go to their experts over `ep`, and over `etp` to the ranks with their other features.

    Shared experts run while rows travel to their experts, and in backward while the rows' gradients travel back.
    Wire, per call: an all-gather of E counts from each rank, for which the host waits, once; two all-to-alls of rows over
    ep, to the experts and back; over etp an all-gather and a reduce-scatter. Backward is the same without the counts.
    Source: Lepikhin et al. 2020, section 3; no capacity: Gale et al. 2022.
    """

    experts: int
    ep_etp: ProcessGroup
    """ranks of ep x etp, etp fastest"""
    ep: ProcessGroup
    etp: ProcessGroup | None = None
    """None: no expert is split"""
    capacity: Capacity | None = None

    @classmethod
    def on(cls, experts: int, mesh: DeviceMesh, capacity: Capacity | None = None) -> Self:
        """mesh: one axis, ep, or two, ep x etp. A collective of its ranks the first time, where both are larger than 1."""
        if mesh.ndim == 1:
            return cls(experts, mesh.get_group(), mesh.get_group(), capacity=capacity)
        large = [dim for dim in range(2) if mesh.size(dim) > 1]
        names = mesh.mesh_dim_names or ("ep", "etp")
        ep_etp = mesh.get_group(large[0] if large else 0)
        if len(large) > 1:
            ep_etp = _torch.flatten_mesh(mesh, "_".join(names)).get_group()
        return cls(experts, ep_etp, mesh.get_group(0), mesh.get_group(1), capacity)

    def __call__(self, x_NC: Tensor, routing: Routing, compute: Compute, meanwhile: Overlapped | None = None) -> Tensor:
        return self.place(x_NC, routing, None, lambda plan: compute, meanwhile)

    def place(
        self,
        x_NC: Tensor,
        routing: Routing,
        placement: Placement | None,
        compute_of: Callable[[DispatchPlan], Compute],
        meanwhile: Overlapped | None = None,
    ) -> Tensor:
        """The call, with experts placed otherwise than in equal runs. compute_of: what computes the experts of this rank, in
        the order of `Placement.on`."""
        order_M, counts_E = kept_pairs(routing, self.experts, self.capacity)
        counts, choices = self.gather_counts(counts_E), routing.experts_NK.shape[-1]
        if placement is None or placement.in_order:
            # What the device does while the counts come to the host.
            rows_MC = take_rows(x_NC, order_M, choices=choices)
            plan = self.plan(counts, placement)
            order_M, rows_MC = _without_dropped(order_M, rows_MC, sum(plan.local_counts))
        else:
            plan = self.plan(counts, placement)
            order_M = order_M.index_select(0, _joined(*plan.segments(), order_M.device))
            rows_MC = take_rows(x_NC, order_M, choices=choices)
        out_MC = self.send_and_compute(rows_MC, plan, compute_of(plan), meanwhile)
        return combine(out_MC, order_M, routing.weights_NK)

    def send_and_compute(
        self, rows: Tensor, plan: DispatchPlan, compute: Compute, meanwhile: Overlapped | None = None
    ) -> Tensor:
        """Send rows, sorted by expert, to their experts; returns the experts' results in the same order."""
        rows = exchange(rows, plan.sent(), plan.received(), self.ep, meanwhile)
        if self.etp is not None:
            rows = gather_rows(rows, plan.gathered(), self.etp)
        # Rows arrive by source rank and, within one, by expert. The kernels want all rows of an expert together.
        order = _by_expert(plan.runs(), len(plan.per_expert()), rows.device)
        out = compute(rows.index_select(0, order), plan.per_expert())
        # The inverse permutation: results return in the order in which rows came, so that the reverse exchange fits them.
        out = out.index_select(0, order.argsort())
        if self.etp is not None:
            out = scatter_sum_rows(out, plan.gathered(), self.etp)
        return exchange(out, plan.received(), plan.sent(), self.ep)

    def gather_counts(self, counts_E: Tensor) -> Callable[[], Tensor]:
        """Every rank's counts, [ep * etp, E], on their way to the host. Wire: an all-gather of E counts."""
        counts = counts_E.new_empty(self.ep_etp.size(), self.experts)
        dist.all_gather_into_tensor(counts, counts_E.unsqueeze(0), group=self.ep_etp)
        return copy_to_host(counts)

    def plan(self, counts: Callable[[], Tensor], placement: Placement | None = None) -> DispatchPlan:
        """counts: of `gather_counts`. The only place where the host waits for the device."""
        etp = 1 if self.etp is None else self.etp.size()
        coordinate = divmod(dist.get_rank(self.ep_etp), etp)
        by_rank = rearrange(counts(), "(ep etp) e -> ep etp e", etp=etp)
        return DispatchPlan(by_rank.tolist(), coordinate, placement, nodes_of(self.ep))


def nodes_of(group: ProcessGroup) -> tuple[int, ...]:
    """The node of each rank of a group."""
    per_node = ranks_per_node()
    return tuple(rank // per_node for rank in dist.get_process_group_ranks(group))


def _joined(starts: list[int], lengths: list[int], device: torch.device) -> Tensor:
    """The indices of runs, one after the other."""
    moved = [start - before for start, before in zip(starts, accumulate([0, *lengths]), strict=False)]
    # `output_size`: without it the host would wait for the device to learn the sum.
    shift, rows = tensor_on(lengths, device), sum(lengths)
    return torch.arange(rows, device=device) + tensor_on(moved, device).repeat_interleave(shift, output_size=rows)


def _without_dropped(order_M: Tensor, rows_MC: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Dropped pairs are last in the order, so cutting it off drops them."""
    return (order_M, rows_MC) if kept == len(order_M) else (order_M[:kept], rows_MC[:kept])


def kept_pairs(routing: Routing, experts: int, capacity: Capacity | None) -> tuple[Tensor, Tensor]:
    """(pairs sorted by expert, dropped ones last; pairs that each expert keeps [E])."""
    # Sorting by expert is sorting by rank too, since ranks hold runs of experts: the all-to-all sends slices.
    order_M, counts_E = sort_by_expert(routing.experts_NK, experts)
    if capacity is None:
        return order_M, counts_E
    order_M, kept_E = keep_within(capacity, routing, order_M, counts_E)
    report_dropped(len(order_M) - kept_E.sum(), len(order_M))
    return order_M, kept_E


def _by_expert(runs: list[int], experts: int, device: torch.device) -> Tensor:
    """The order that sorts rows by expert. Rows come in runs of one expert each: `experts` runs from each source rank."""
    ids = torch.arange(experts, device=device).repeat(len(runs) // max(experts, 1))
    # `output_size`: without it the host would wait for the device to learn the sum.
    return ids.repeat_interleave(tensor_on(runs, device), output_size=sum(runs)).argsort(stable=True)


# Expert capacity: which (token, choice) pairs an expert keeps if it has more than its limit.


def keep_within(capacity: Capacity, routing: Routing, order_M: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    """(the pairs of `sort_by_expert` in its order, dropped ones last; pairs that each expert keeps [E]).

    Dropped pairs are moved and not cut off: their number is on the device, and the host need not wait for it here.
    """
    pairs, experts = len(order_M), len(counts_E)
    limit_E = torch.full_like(counts_E, ceil(capacity.factor * pairs / experts))
    if capacity.least == "angle":
        assert routing.least_E is not None, "expert_parallel asks the router for it"
        limit_E = torch.maximum(limit_E, routing.least_E.ceil().to(limit_E.dtype))
    place_M = torch.arange(pairs, device=order_M.device)
    # The index of each pair among those of its expert, in the order of tokens; with drop="probability", in that of weights.
    first_M = (counts_E.cumsum(0) - counts_E).repeat_interleave(counts_E, output_size=pairs)
    rank_M = place_M - first_M  # among the pairs of the same expert
    if capacity.drop == "probability":
        weights_M = routing.weights_NK.detach().flatten()[order_M]
        expert_M = routing.experts_NK.flatten()[order_M]
        # Two stable sorts, by weight and then by expert: equal weights keep the order of tokens on every device.
        by_weight = weights_M.argsort(descending=True, stable=True)
        by_expert = by_weight[expert_M[by_weight].argsort(stable=True)]
        rank_M = torch.empty_like(place_M).scatter_(0, by_expert, rank_M)
    limit_M = limit_E.repeat_interleave(counts_E, output_size=pairs)
    return order_M[(rank_M >= limit_M).to(torch.uint8).argsort(stable=True)], torch.minimum(counts_E, limit_E)
