"""Point-to-point messages between groups of cp ranks that hold the same heads, and of ranks: ring attention, states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from meshkit.core import _torch
from meshkit.core.waiting import waiting
from meshkit.parallel.context._layout import Layout


@dataclass(frozen=True)
class RingGroup:
    """This rank's position among the groups of a layout."""

    process_group: dist.ProcessGroup
    rank: int
    group: int
    groups: int
    ulysses: int

    def peer(self, group: int) -> int:
        """The rank of the cp axis that holds this rank's heads in another group (counted round the ring)."""
        return (group % self.groups) * self.ulysses + self.rank % self.ulysses

    def exchange(self, sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]]) -> Pending:
        """Start sending (tensor, to group) and receiving (into tensor, from group). Empty tensors are skipped on both ends.

        Tensors must be contiguous. Until `wait` of the result nobody else may write them, or read what is received.
        """
        ops = [
            dist.P2POp(kind, tensor, group=self.process_group, group_peer=self.peer(group))
            for kind, messages in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, group in messages
            if tensor.numel()
        ]
        # Both ends leave out a message of no elements, each from the layout alone: a receive without its send would hang.
        # One batch, which NCCL runs as one group: two ranks that each issued their send first would wait for one another.
        works = dist.batch_isend_irecv(ops) if ops else []
        return Pending(works, [op.tensor for op in ops])


@dataclass(frozen=True)
class Pending:
    """Messages under way. Keeps their tensors referenced, so that the allocator does not reuse the memory."""

    works: list[dist.Work]
    tensors: list[Tensor]

    def wait(self, what: str = "keys and values of another cp group") -> None:
        """what: is waited for, as the watchdog says it."""
        if not self.works:
            return
        # Afterwards the current stream may read what was received and overwrite what was sent. NCCL: the host does not block.
        with waiting(what):
            for work in self.works:
                work.wait()


NOTHING = Pending([], [])


def empty_block(kv: Tensor, tokens: int) -> Tensor:
    """Memory for `tokens` tokens of another group: shape, dtype and device as kv [2, B, S, K, D] has them."""
    return kv.new_empty((*kv.shape[:2], tokens, *kv.shape[3:]))


def ring_group_of(layout: Layout, group_name: str) -> RingGroup:
    process_group = _torch.process_group(group_name)
    rank = dist.get_rank(process_group)
    return RingGroup(process_group, rank, rank // layout.ulysses, layout.groups, layout.ulysses)
