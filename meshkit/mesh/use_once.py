"""The first use of process groups, when they are made and in one order."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from meshkit.core import _torch
from meshkit.core.waiting import waiting

# [Note: each group is used when it is made]
# NCCL makes a group's communicator at its first call, for which the hosts of all its ranks wait, and a first call that is a
# batch of messages must have all ranks of the group in it. In a step some ranks would come to it in another order, or have
# nothing to send. So every group is used once when it is made, by all of its ranks, in an order that all ranks have.


def use_once(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Wire: an all-reduce of a number over each group of more than one rank. Every rank of a group calls, in one order."""
    for group in groups:
        if group.size() > 1 and not _torch.is_fake_group(group):
            with waiting(f"the first use of a group of {group.size()} ranks"):
                dist.all_reduce(torch.zeros(1, device=device), group=group)
