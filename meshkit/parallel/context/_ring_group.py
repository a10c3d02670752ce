"""Messages between the groups of a layout: the ranks that hold the same heads, one of each group."""

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
    """This rank's place among the groups."""

    process_group: dist.ProcessGroup
    rank: int
    group: int
    groups: int
    ulysses: int

    def peer(self, group: int) -> int:
        """The rank of the cp axis that holds our heads in another group."""
        return (group % self.groups) * self.ulysses + self.rank % self.ulysses

    def exchange(self, sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]]) -> Pending:
        """Start sending (tensor, to group) and receiving (into tensor, from group). Empty tensors are not sent.

        The tensors must be contiguous, and are ours again after `wait`.
        """
        ops = [
            dist.P2POp(kind, tensor, group=self.process_group, group_peer=self.peer(group))
            for kind, messages in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, group in messages
            if tensor.numel()
        ]
        # One batch, which NCCL runs as one kernel: of two ranks that each send first, neither would get to its receive.
        works = dist.batch_isend_irecv(ops) if ops else []
        return Pending(works, [op.tensor for op in ops])


@dataclass(frozen=True)
class Pending:
    """Messages on their way. Holds their tensors, so that nobody reuses the memory."""

    works: list[dist.Work]
    tensors: list[Tensor]

    def wait(self) -> None:
        if not self.works:
            return
        # After it the current stream may read what has come, and the tensors sent may be written again.
        with waiting("keys and values of another cp group"):
            for work in self.works:
                work.wait()


NOTHING = Pending([], [])


def ring_group_of(layout: Layout, group_name: str) -> RingGroup:
    process_group = _torch.process_group(group_name)
    rank = dist.get_rank(process_group)
    return RingGroup(process_group, rank, rank // layout.ulysses, layout.groups, layout.ulysses)
