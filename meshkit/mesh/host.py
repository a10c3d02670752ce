"""Values of the host (Python objects) between ranks, beside a device's communicator: over a tree of small gloo groups.

The host waits for no device in them, a thread may use them beside training, and a rank has few sockets, whatever the world.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core import _torch
from meshkit.core.calls import name_group
from meshkit.core.waiting import waiting

T = TypeVar("T")

WIDTH = 4
"""ranks in a group of the tree"""
HOSTS = "hosts"
"""what its groups are called, where calls are told by their axis"""
HEAD, _SIZE = 1024, 8  # bytes of a value's first message, in which most are whole, and of them for how many it has

# [Note: a tree of groups]
# gloo connects each rank of a group with each other one, so that a group of all ranks costs a rank as many sockets as there
# are ranks, and its all-gathers go once around all of them. Here each 4 ranks are a group, their first ranks are groups of 4
# again, and so on: values go up to the first rank of all and down again. On 16,384 ranks the first has 28 sockets, most have
# 4, and a value travels 14 times. A wait that takes too long ends gloo's connection, for all who use it: so threads, and
# whoever has another timeout, have a tree of their own, of which there is room for two.


class HostRanks:
    """The ranks of a process group, meeting on the host. Its methods are collectives of them, in one order on all.

    Values are such as pickle takes. Wire: a value up a tree, or down, in one message of 1 KiB, or two.
    Raises: DistError where another rank is lost, or does not come within the timeout; and from then on at once.
    """

    def __init__(self, parent: dist.ProcessGroup, timeout: timedelta) -> None:
        self.parent, self.rank, self.size, self.timeout = parent, parent.rank(), parent.size(), timeout
        self._groups: list[tuple[int, dist.ProcessGroup]] = []  # with their levels, from the lowest up
        self._lost = ""
        self.alone = self.size == 1 or _torch.is_fake_group(parent)
        if self.alone:
            return
        ranks = dist.get_process_group_ranks(parent)
        partitions = [[[ranks[each] for each in group] for group in level] for level in levels(self.size)]
        groups = _torch.split(parent, partitions, backend="gloo", timeout=timeout)
        for level, group in enumerate(groups):
            if group is not None:
                name_group(group.group_name, HOSTS)
                self._groups.append((level, group))

    def apart(self, timeout: timedelta) -> HostRanks:
        """The same ranks once more, for a thread that meets beside others, or with a timeout of its own. A collective."""
        return HostRanks(self.parent, timeout)

    def close(self) -> None:
        """Give its groups back. Nobody meets here any more."""
        groups, self._groups, self._lost = self._groups, [], self._lost or "they were closed"
        for _, group in groups if dist.is_initialized() else ():
            dist.destroy_process_group(group)

    def barrier(self) -> None:
        """Return when every rank has come."""
        self.all_reduce(None, lambda _: None)

    def gather(self, value: T) -> list[T] | None:
        """Each rank's value, in order, on the first rank; None on all others."""
        return self.reduce([value], lambda parts: [*chain.from_iterable(parts)])

    def all_gather(self, value: T) -> list[T]:
        """Each rank's value, in order, on every rank."""
        return cast(list[T], self.broadcast(self.gather(value)))

    def all_reduce(self, value: T, combine: Callable[[list[T]], T]) -> T:
        """As `reduce`, on every rank."""
        return cast(T, self.broadcast(self.reduce(value, combine)))

    def reduce(self, value: T, combine: Callable[[list[T]], T]) -> T | None:
        """Their values as one, on the first rank; None on all others.

        combine: makes one of several, in the order of ranks, some of which it has made of others before.
        """
        if self.alone:
            return combine([value] * self.size)
        with self._meeting():
            for _, group in self._groups:
                if group.rank() > 0:
                    self._send({0: _packed(value)}, group)
                    return None
                value = combine([value, *map(_unpacked, self._receive(range(1, group.size()), group))])
        return value

    def broadcast(self, value: T) -> T:
        """The first rank's value, on every rank."""
        if self.alone:
            return value
        content = _packed(value) if self.rank == 0 else torch.empty(0)
        with self._meeting():
            for _, group in reversed(self._groups):
                if group.rank() > 0:
                    (content,) = self._receive([0], group)
                else:
                    self._send(dict.fromkeys(range(1, group.size()), content), group)
        return value if self.rank == 0 else cast(T, _unpacked(content))

    def scatter(self, values: Sequence[T] | None) -> T:
        """Each rank its own of the first rank's values, one for each; None on all others."""
        part = list(values or ())
        if self.alone:
            return part[self.rank]
        with self._meeting():
            for level, group in reversed(self._groups):
                unit = WIDTH**level  # ranks below each of the group's
                if group.rank() > 0:
                    (content,) = self._receive([0], group)
                    part = _unpacked(content)
                else:
                    others = {each: _packed(part[each * unit : (each + 1) * unit]) for each in range(1, group.size())}
                    self._send(others, group)
                    part = part[:unit]
        return part[0]

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        if not self._lost:
            try:
                with waiting(f"the values of {self.size} ranks on the host"):
                    yield
                return
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0].rpartition("] ")[2]
                self._lost = (
                    f"another rank is gone, or did not come within {self.timeout.total_seconds():g} s ({reason})"
                )
                raise dist.DistError(f"between hosts: {self._lost}") from error
        raise dist.DistError(f"between hosts: {self._lost}")

    def _send(self, contents: Mapping[int, Tensor], group: dist.ProcessGroup) -> None:
        """contents: bytes for ranks of the group."""
        works = []
        for peer, content in contents.items():
            head = torch.zeros(HEAD, dtype=torch.uint8)
            head[:_SIZE] = torch.tensor([content.numel()]).view(torch.uint8)
            head[_SIZE : _SIZE + content.numel()] = content[: HEAD - _SIZE]
            works += [dist.isend(each, group=group, group_dst=peer) for each in _parts(head, content)]
        self._wait(works)

    def _receive(self, peers: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
        heads = [torch.empty(HEAD, dtype=torch.uint8) for _ in peers]
        self._wait([dist.irecv(head, group=group, group_src=peer) for peer, head in zip(peers, heads, strict=True)])
        contents = [torch.empty(int(head[:_SIZE].view(torch.int64)), dtype=torch.uint8) for head in heads]
        works = []
        for peer, head, content in zip(peers, heads, contents, strict=True):
            first = head[_SIZE : _SIZE + content.numel()]
            content[: first.numel()] = first
            rest = _parts(head, content)[1:]
            works += [dist.irecv(each, group=group, group_src=peer) for each in rest]
        self._wait(works)
        return contents

    def _wait(self, works: Sequence[dist.Work | None]) -> None:
        for work in works:
            assert work is not None  # this rank is in the group
            work.wait(self.timeout)


def _packed(value: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(content: Tensor) -> Any:
    return pickle.loads(content.numpy().data)


def _parts(head: Tensor, content: Tensor) -> list[Tensor]:
    """The messages of a value: its head, and what of it has no room there."""
    rest = content[HEAD - _SIZE :]
    return [head, rest] if rest.numel() else [head]


def levels(size: int) -> list[list[list[int]]]:
    """The groups of a tree over `size` ranks, from the lowest level up, those of more than one rank. See [Note: a tree of
    groups]."""
    found = []
    ranks = list(range(size))
    while len(ranks) > 1:
        groups = [ranks[first : first + WIDTH] for first in range(0, len(ranks), WIDTH)]
        found.append([group for group in groups if len(group) > 1])
        ranks = [group[0] for group in groups]
    return found


_made: dict[str, HostRanks] = {}


def host_ranks(group: dist.ProcessGroup, timeout: timedelta | None = None) -> HostRanks:
    """Those of a process group, made at the first call, which is a collective of its ranks on their main threads.

    timeout: of that group's operations if not given. Wire: then names over `group`.
    """
    known = _made.get(group.group_name)
    if known is None or known.parent is not group:
        known = _made[group.group_name] = HostRanks(group, timeout or _torch.timeout_of(group))
    return known
