"""Expert all-to-all: differentiable exchanges of rows between ranks with unequal row counts, in mirrored pairs.

| forward                                                      | backward              |
|--------------------------------------------------------------|-----------------------|
| `exchange`: all-to-all with a row count for each rank        | the reverse all-to-all |
| `gather_rows`: all ranks' rows, which each uses differently  | `scatter_sum_rows`    |
| `scatter_sum_rows`: this rank's rows of a sum over ranks     | `gather_rows`         |
| `local_rows`: this rank's share of rows that all ranks have  | `join_rows`           |
| `join_rows`: all ranks' rows, which each uses the same way   | `local_rows`          |

Row counts are host integers. On a group of one rank each function is the identity and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup

from meshkit.core.double_backward import once_differentiable
from meshkit.core.waiting import waiting
from meshkit.moe.routing import Overlapped

Move = Callable[[Tensor], Tensor]
once = once_differentiable(
    "the messages of experts in backward have no gradient of their own.", "Use a mesh without ep and etp"
)


def all_gather_rows(rows: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Outside autograd. Wire: one all-gather, of the largest number of rows from each rank."""
    if group.size() == 1:
        return rows
    # Padded, because collectives of one tensor want equal sizes; one message beats a list of them.
    longest = max(sizes)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    out = rows.new_empty(longest * group.size(), *rows.shape[1:])
    dist.all_gather_into_tensor(out, padded, group=group)
    pieces = rearrange(out, "(rank row) ... -> rank row ...", rank=group.size())
    joined: Tensor = torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])
    return joined


def reduce_scatter_rows(rows: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Outside autograd. Wire: one reduce-scatter, of the largest number of rows for each rank."""
    if group.size() == 1:
        return rows
    longest = max(sizes)
    # Zeros, so that no uninitialised memory is summed, though the padding is cut off again.
    padded = rows.new_zeros(group.size(), longest, *rows.shape[1:])
    for padded_piece, piece, size in zip(padded, rows.split(list(sizes)), sizes, strict=True):
        padded_piece[:size] = piece
    out = rows.new_empty(longest, *rows.shape[1:])
    dist.reduce_scatter_tensor(out, rearrange(padded, "rank row ... -> (rank row) ..."), group=group)
    # A clone, since the padded buffer would live as long as its slice.
    local: Tensor = out[: sizes[dist.get_rank(group)]].clone()
    return local


def _local(rows: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    local: Tensor = rows.split(list(sizes))[dist.get_rank(group)].clone()
    return local


class _Mirrored(torch.autograd.Function):
    """Runs `forward_move` on rows and `backward_move` on their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, forward_move: Move, backward_move: Move) -> Tensor:
        ctx.backward_move = backward_move
        return forward_move(rows)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_move(grad), None, None


class _AllToAllPair:
    """An asynchronous all-to-all of rows and, later, the reverse one of their gradients. Owns the buffers until `wait`."""

    def __init__(self, sent: list[int], received: list[int], group: ProcessGroup) -> None:
        self.sent, self.received, self.group = sent, received, group
        self._pending: tuple[dist.Work, Tensor, Tensor] | None = None

    def start(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Start the all-to-all. Returns its output buffer, which is filled after `wait`."""
        rows = rows.contiguous()
        out = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(out, rows, received, sent, group=self.group, async_op=True)
        assert work is not None
        self._pending = work, rows, out
        return out

    def wait(self) -> Tensor:
        assert self._pending is not None, "no all-to-all is under way"
        work, _, out = self._pending
        with waiting("rows of other ep ranks"):
            work.wait()
        self._pending = None
        return out


# [Note: start and wait are two autograd nodes]
# Backward runs nodes in the reverse order of forward, so whatever runs between `_Start` and `_Wait` in forward runs between
# them in backward too. There the roles swap: `_Wait.backward` starts the all-to-all of gradients, the nodes of `meanwhile`
# run, and `_Start.backward` waits. The tensor between the two nodes is the buffer being filled; nothing else may see it.


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, pair: _AllToAllPair) -> Tensor:
        ctx.pair = pair
        return pair.start(rows, pair.sent, pair.received)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.pair.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, pair: _AllToAllPair) -> Tensor:
        ctx.pair = pair
        pair.wait()
        return rows.view_as(rows)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.pair.start(grad, ctx.pair.received, ctx.pair.sent)
        return grad, None  # a stand-in of the right shape: `_Start.backward` returns the gradients that arrive


def exchange(
    rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup, meanwhile: Overlapped | None = None
) -> Tensor:
    """All-to-all of rows: sent[r] rows go to rank r, received[r] rows come from rank r, both in order of ranks.

    meanwhile: runs while the rows travel, and its backward while their gradients do.
    Wire: an all-to-all in each direction.
    """
    if group.size() == 1:
        return rows
    pair = _AllToAllPair(sent, received, group)
    filling: Tensor = _Start.apply(rows, pair)  # see [Note: start and wait are two autograd nodes]
    if meanwhile is not None:
        meanwhile.run()
    arrived: Tensor = _Wait.apply(filling, pair)
    return arrived


def gather_rows(rows: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """All ranks' rows, sizes[r] of rank r. Wire: an all-gather; backward a reduce-scatter."""
    return _mirrored(all_gather_rows, reduce_scatter_rows, rows, sizes, group)


def scatter_sum_rows(rows: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """This rank's rows of the sum over ranks of `rows`. Wire: a reduce-scatter; backward an all-gather."""
    return _mirrored(reduce_scatter_rows, all_gather_rows, rows, sizes, group)


def local_rows(rows: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """This rank's share of rows that are the same on every rank. Wire: backward, an all-gather."""
    return _mirrored(_local, all_gather_rows, rows, sizes, group)


def join_rows(rows: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """All ranks' rows, for a use that is the same on every rank. Wire: forward, an all-gather."""
    return _mirrored(all_gather_rows, _local, rows, sizes, group)


def _mirrored(
    forward_move: Callable[..., Tensor],
    backward_move: Callable[..., Tensor],
    rows: Tensor,
    sizes: Sequence[int],
    group: ProcessGroup,
) -> Tensor:
    if group.size() == 1:
        return rows
    bound = {"sizes": sizes, "group": group}
    moved: Tensor = _Mirrored.apply(rows, partial(forward_move, **bound), partial(backward_move, **bound))
    return moved
