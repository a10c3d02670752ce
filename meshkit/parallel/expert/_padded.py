"""Token dispatch with padded rows (static shapes, no host synchronisation): every rank sends every other as many rows.

Dims: N tokens of this rank, K experts that a token chooses, M = N * K pairs, S ranks of ep x etp, R rows for each rank of ep
(`max_rows`), E experts, L experts of this rank, C features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core import _torch
from meshkit.core.to_device import copy_to_host
from meshkit.errors import StepError
from meshkit.mesh import Mesh
from meshkit.moe.aux_loss import Collected, report_rows
from meshkit.moe.routing import Overlapped, Routing, weighted_sum
from meshkit.parallel.expert._dispatch import AllToAll, Compute, experts_of, kept_pairs
from meshkit.parallel.expert._exchange import exchange, gather_rows, scatter_sum_rows
from meshkit.strategy import Capacity


@dataclass(frozen=True)
class PaddedAllToAll:
    """The expert all-to-all with `max_rows` rows from each rank to each rank of `ep`, so that the host reads no counts.

    Rows that nobody fills are zeros. Counts stay on the device: `compute` gets them as a tensor [L], and whatever it makes of
    the rows after their sum is cut off, forward and backward. Nothing is dropped in silence: the most rows that a rank had
    for another are reported, and `refuse_overflow` ends the step. Where nobody collects reports, the call itself looks.
    Wire, per call: an all-gather of E counts from each rank; two all-to-alls over ep, of `max_rows` rows for each rank; over
    etp an all-gather and a reduce-scatter of ep * `max_rows` rows of each rank. Backward is the same without the counts.
    Raises: StepError where nobody collects reports, on all ranks that share the experts; the host waits for it.
    Source: Lepikhin et al. 2020, section 3.2, for static shapes; a bound on rows without drops: DeepEP 2025.
    """

    sized: AllToAll
    """the same exchange with counts: its groups and its capacity"""
    max_rows: int

    @classmethod
    def on(cls, experts: int, mesh: DeviceMesh, max_rows: int, capacity: Capacity | None = None) -> Self:
        """As `AllToAll.on`."""
        return cls(AllToAll.on(experts, mesh, capacity), max_rows)

    def __call__(self, x_NC: Tensor, routing: Routing, compute: Compute, meanwhile: Overlapped | None = None) -> Tensor:
        ep, etp, most = self.sized.ep, self.sized.etp, self.max_rows
        order_M, counts_E = kept_pairs(routing, self.sized.experts, self.sized.capacity)
        counts_SE = counts_E.new_empty(self.sized.ep_etp.size(), self.sized.experts)
        dist.all_gather_into_tensor(counts_SE, counts_E.unsqueeze(0), group=self.sized.ep_etp)
        self._report(counts_SE)
        place_M = self._places(order_M, counts_E)
        # Each pair has a place of its own in the rows that are sent, but those without one: they share the last, which is
        # cut off. So gradients are read where rows were written, and no two are added.
        pairs_MC = repeat(x_NC, "n c -> (n k) c", k=routing.experts_NK.shape[-1])
        rows = pairs_MC.new_zeros(ep.size() * most + 1, x_NC.shape[-1]).index_copy(0, place_M, pairs_MC)[:-1]
        sizes = [most] * ep.size()
        rows = exchange(rows, sizes, sizes, ep, meanwhile)
        sources = [ep.size() * most] * (1 if etp is None else etp.size())
        if etp is not None:
            rows = gather_rows(rows, sources, etp)
        order, counts_L = self._by_expert(counts_SE)
        used = (torch.arange(len(order), device=order.device) < counts_L.sum()).unsqueeze(1)
        # Zeros around `compute`: a kernel that stops at the last expert's last row leaves the rest of its output, and of its
        # input's gradient, as the memory was.
        out = compute(rows.index_select(0, order).where(used, 0), counts_L).where(used, 0)
        out = out.index_select(0, order.argsort())
        if etp is not None:
            out = scatter_sum_rows(out, sources, etp)
        out = exchange(out, sizes, sizes, ep)
        has_place = (place_M < len(out)).unsqueeze(1)
        out_MC = out.index_select(0, place_M.clamp(max=len(out) - 1)).where(has_place, 0)
        return weighted_sum(out_MC, routing.weights_NK)

    def _places(self, order_M: Tensor, counts_E: Tensor) -> Tensor:
        """Of each pair, in the order of tokens: its row in [ep * R], or ep * R where there is none for it."""
        ranks, pairs = self.sized.ep.size(), len(order_M)
        ends = _per_rank(counts_E, ranks).cumsum(0)
        index_M = torch.arange(pairs, device=order_M.device)
        rank_M = torch.searchsorted(ends, index_M, right=True)  # `ranks` for pairs that were dropped, which are last
        within_M = index_M - F.pad(ends, (1, 0)).index_select(0, rank_M)
        fits_M = (rank_M < ranks) & (within_M < self.max_rows)
        sorted_M = torch.where(fits_M, rank_M * self.max_rows + within_M, ranks * self.max_rows)
        return torch.empty_like(order_M).scatter_(0, order_M, sorted_M)

    def _by_expert(self, counts_SE: Tensor) -> tuple[Tensor, Tensor]:
        """(the order that sorts rows after the gather over etp by expert, rows of nobody last; how many each has [L])."""
        ep = self.sized.ep
        experts = experts_of(self.sized.experts, ep.size(), dist.get_rank(ep))
        # Rows come by rank of etp, then by rank of ep, and within each by expert: up to where each expert's rows end.
        counts_SL = rearrange(counts_SE, "(ep etp) e -> (etp ep) e", ep=ep.size())[:, experts.start : experts.stop]
        ends = counts_SL.cumsum(-1).clamp(max=self.max_rows)
        index = torch.arange(self.max_rows, device=ends.device).expand(len(ends), -1).contiguous()
        expert = torch.searchsorted(ends, index, right=True)  # L where no row was put
        return expert.flatten().argsort(stable=True), ends.diff(prepend=ends.new_zeros(len(ends), 1)).sum(0)

    def _report(self, counts_SE: Tensor) -> None:
        if _torch.is_fake(counts_SE):
            return
        most = _per_rank(counts_SE, self.sized.ep.size()).max()
        if not report_rows(most):
            _refuse(int(copy_to_host(most)()), self.max_rows)


def _per_rank(counts: Tensor, ranks: int) -> Tensor:
    """Of counts of experts [..., E]: their sums over the experts of each rank, [..., ranks]."""
    experts = counts.shape[-1]
    per_rank = len(experts_of(experts, ranks, 0))  # of the last rank there may be fewer
    return reduce(F.pad(counts, (0, ranks * per_rank - experts)), "... (rank e) -> ... rank", "sum", rank=ranks)


def refuse_overflow(collected: Iterable[Collected], mesh: Mesh, max_rows: int) -> None:
    """At the end of a step, refuse what did not fit into `max_rows`. The host waits for the device, once.

    A collective of all ranks of the mesh. Wire: an all-reduce of one number over it. Raises: StepError, on every rank.
    """
    reported = [most for each in collected for most in each.most_rows]  # none on a stage without experts
    most = torch.stack(reported).max() if reported else torch.zeros((), dtype=torch.int64).to(mesh.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.group)
    _refuse(int(copy_to_host(most)()), max_rows)


def _refuse(most: int, max_rows: int) -> None:
    if most > max_rows:
        raise StepError(
            f"ExpertPolicy: max_rows={max_rows}, but a rank had {most} rows for the experts of one rank, and the rest were "
            "left out. What was computed is wrong: zero the gradients, and use a larger max_rows, or none."
        )
