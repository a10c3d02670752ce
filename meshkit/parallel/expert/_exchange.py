"""Expert all-to-all: rows of unequal numbers between ranks, differentiable, in mirrored pairs.

| forward                                          | backward             |
|--------------------------------------------------|----------------------|
| `exchange`: all-to-all, so many rows to each     | the all-to-all back  |
| `gather_rows`: everybody's rows, used differently| `scatter_sum_rows`   |
| `scatter_sum_rows`: own rows of a sum            | `gather_rows`        |
| `own_rows`: of rows that every rank has          | `join_rows`          |
| `join_rows`: everybody's rows, used alike        | `own_rows`           |

Numbers of rows are on the host. On a group of one rank each is the identity and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshkit.core.waiting import waiting
from meshkit.moe.routing import Overlapped

Move = Callable[[Tensor], Tensor]


def all_gather_rows(rows: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Outside autograd. Wire: one all-gather, of the largest number of rows from each rank."""
    if group.size() == 1:
        return rows
    longest = max(sizes)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    out = rows.new_empty(longest * group.size(), *rows.shape[1:])
    dist.all_gather_into_tensor(out, padded, group=group)
    pieces = out.unflatten(0, (group.size(), longest)).unbind()
    joined: Tensor = torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])
    return joined


def reduce_scatter_rows(rows: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Outside autograd. Wire: one reduce-scatter, of the largest number of rows for each rank."""
    if group.size() == 1:
        return rows
    longest = max(sizes)
    padded = rows.new_zeros(group.size(), longest, *rows.shape[1:])
    for piece, part, size in zip(padded, rows.split(list(sizes)), sizes, strict=True):
        piece[:size] = part
    out = rows.new_empty(longest, *rows.shape[1:])
    dist.reduce_scatter_tensor(out, padded.flatten(0, 1), group=group)
    own: Tensor = out[: sizes[dist.get_rank(group)]].clone()
    return own


def _own(rows: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    own: Tensor = rows.split(list(sizes))[dist.get_rank(group)].clone()
    return own


class _Mirrored(torch.autograd.Function):
    """Forward one way, backward the other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


class _Way:
    """One exchange of rows and, later, of their gradients. Owns what travels until it has arrived."""

    def __init__(self, sent: list[int], received: list[int], group: ProcessGroup) -> None:
        self.sent, self.received, self.group = sent, received, group
        self._travelling: tuple[dist.Work, Tensor, Tensor] | None = None

    def depart(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Where the rows will be after `arrive`."""
        rows = rows.contiguous()
        out = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(out, rows, received, sent, group=self.group, async_op=True)
        assert work is not None
        self._travelling = work, rows, out
        return out

    def arrive(self) -> Tensor:
        assert self._travelling is not None, "nothing is on its way"
        work, _, out = self._travelling
        with waiting("rows of other ep ranks"):
            work.wait()
        self._travelling = None
        return out


# [Note: departing and arriving are two nodes]
# Backward runs nodes in the reverse order of forward. What ran between the two in forward is between them in backward too:
# the gradients depart in `_Arrive`, the nodes of `meanwhile` run, and `_Depart` waits for them. Nobody else sees the tensor
# that is being filled.


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return way.depart(rows, way.sent, way.received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.way.arrive(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        way.arrive()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.way.depart(grad, ctx.way.received, ctx.way.sent)
        return grad, None  # of the right shape; `_Depart` has the rows that come


def exchange(
    rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup, meanwhile: Overlapped | None = None
) -> Tensor:
    """sent[r] rows to rank r, in order; received[r] rows of rank r, in order.

    meanwhile: runs while the rows travel, and its backward while their gradients do.
    Wire: an all-to-all in each direction.
    """
    if group.size() == 1:
        return rows
    way = _Way(sent, received, group)
    travelling: Tensor = _Depart.apply(rows, way)
    if meanwhile is not None:
        meanwhile.run()
    arrived: Tensor = _Arrive.apply(travelling, way)
    return arrived


def gather_rows(rows: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """sizes[r] rows of rank r, joined. Wire: an all-gather; backward a reduce-scatter."""
    return _mirrored(all_gather_rows, reduce_scatter_rows, rows, sizes, group)


def scatter_sum_rows(rows: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """A different summand on each rank in, own rows of the sum out. Wire: a reduce-scatter; backward an all-gather."""
    return _mirrored(reduce_scatter_rows, all_gather_rows, rows, sizes, group)


def own_rows(rows: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """The same rows on every rank in, own ones out. Wire: backward, an all-gather."""
    return _mirrored(_own, all_gather_rows, rows, sizes, group)


def join_rows(rows: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Own rows in, all out, used the same by every rank. Wire: forward, an all-gather."""
    return _mirrored(all_gather_rows, _own, rows, sizes, group)


def _mirrored(
    there: Callable[..., Tensor],
    back: Callable[..., Tensor],
    rows: Tensor,
    sizes: Sequence[int],
    group: ProcessGroup,
) -> Tensor:
    if group.size() == 1:
        return rows
    where = {"sizes": sizes, "group": group}
    moved: Tensor = _Mirrored.apply(rows, partial(there, **where), partial(back, **where))
    return moved
