"""Channels of a pipeline: one way between two ranks each, over which messages keep their order.

[Note: a channel for each way]
NCCL matches the messages of two ranks by order alone, runs what is issued on a communicator one after the other, and may let
both hosts wait when a communicator is made, which it is at its first use. So each way from one rank to another has a group of
these two ranks and a communicator of its own: a receive that is posted ahead stands in front of nothing but later messages of
the same sender. All are made and used once when the stages are cut, by every rank in the order of one list, so no host waits
for a communicator in a step; those that only a table with skipped stages takes, and that is not known then, before its first.
What is sent is one batch for each message, since a send outside of a batch makes one more communicator on torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core import _torch
from meshkit.core.calls import axis_of, name_group
from meshkit.core.waiting import waiting

Way = tuple[int, int]
"""(rank that sends, rank that receives), of the axis"""


class Channels(Protocol):
    """What sends and receives between ranks of the axis. Each call is one message; the works of its tensors come back."""

    def send(self, values: Sequence[Tensor], target: int) -> list[dist.Work]: ...

    def receive(self, buffers: Sequence[Tensor], source: int) -> list[dist.Work]: ...


class GroupChannels:
    """Channels over process groups of two ranks, by way; of this rank's ways. ways: those of all ranks."""

    def __init__(self, rank: int, groups: dict[Way, dist.ProcessGroup], ways: frozenset[Way]) -> None:
        self.rank, self.groups, self.ways = rank, groups, ways

    def with_more(self, other: GroupChannels) -> GroupChannels:
        return GroupChannels(self.rank, self.groups | other.groups, self.ways | other.ways)

    def send(self, values: Sequence[Tensor], target: int) -> list[dist.Work]:
        return _batch(dist.isend, values, self.groups[self.rank, target], int(target > self.rank))

    def receive(self, buffers: Sequence[Tensor], source: int) -> list[dist.Work]:
        return _batch(dist.irecv, buffers, self.groups[source, self.rank], int(source > self.rank))


def _batch(op: object, tensors: Sequence[Tensor], group: dist.ProcessGroup, peer: int) -> list[dist.Work]:
    """peer: its rank in the group, whose ranks ascend."""
    ops = [dist.P2POp(op, tensor, group=group, group_peer=peer) for tensor in tensors]  # type: ignore[arg-type]  # any callable
    works: list[dist.Work] = dist.batch_isend_irecv(ops) if ops else []
    return works


def ways_of(placement: Sequence[int], *, tied: bool) -> frozenset[Way]:
    """The ways that messages of a pipeline take: forward and back between the ranks of neighbouring stages, and between the
    first and the last where these have tied parameters."""
    pairs = [*pairwise(placement), *([(placement[0], placement[-1])] if tied else [])]
    return frozenset(way for a, b in pairs if a != b for way in ((a, b), (b, a)))


def in_rounds(ways: Iterable[Way]) -> tuple[tuple[Way, ...], ...]:
    """In rounds in which no rank has two, so that those of one round are one split of the axis' group, and open at once."""
    rounds: list[list[Way]] = []
    for way in sorted(ways):
        open_round = next((each for each in rounds if all(set(way).isdisjoint(other) for other in each)), None)
        if open_round is None:
            rounds.append([way])
        else:
            open_round.append(way)
    return tuple(map(tuple, rounds))


@lru_cache
def open_channels(group: dist.ProcessGroup, rounds: tuple[tuple[Way, ...], ...], device: torch.device) -> GroupChannels:
    """The channels of this rank, each used once. Cached: each costs a communicator.

    group: of the axis; every rank of it calls, and no other. Wire: a broadcast of names over it, a split of its communicator
    for each round, and a byte on each way.
    """
    rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    partitions = [[sorted(ranks[end] for end in way) for way in ways] for ways in rounds]
    made = _torch.split(group, partitions, timeout=_torch.timeout_of(group))
    own = [next((way for way in ways if rank in way), None) for ways in rounds]
    groups = {way: pair for way, pair in zip(own, made, strict=True) if way and pair}
    channels = GroupChannels(rank, groups, frozenset(chain.from_iterable(rounds)))
    for pair in channels.groups.values():
        name_group(pair.group_name, axis_of(group.group_name))
    if _torch.is_fake_group(group):
        return channels
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    for source, target in channels.groups:
        works = channels.send([byte], target) if rank == source else channels.receive([byte], source)
        with waiting(f"pp rank {target if rank == source else source} to open its channel"):
            for work in works:
                work.wait()
    return channels
