"""Leases of groups to rollout workers: who writes what, and until when. Numbers only, no communication.

A group is what is made of one first sample, see `meshkit.algos.dataflow`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from meshkit.algos.dataflow import Buffer


@dataclass
class Lease:
    """node: who has it. until: on the clock, when others may have it. version: of the weights that begin the group."""

    node: str
    until: float
    version: int


# [Note: who takes all and writes nothing]
# A worker that renews for ever what it does not write would stop the run. So it has at most `most` groups, and each for at
# most `longest` leases: then others may have it for a lease before the worker may again. Who is only slow loses nothing but
# that another writes it too: the first that comes is taken. Dropping a group and asking for it again begins no new count.


@dataclass
class Leases:
    """Which groups are begun, and by whom. A group whose worker is not heard of for `lease_s` is given to another.

    most: groups of a worker at the same time. longest: leases for which it may have one. next: the first group that nobody
    was given. free: those that were given to a worker that is lost. oldest: by group, the least version that it was ever
    begun with. since: by group and worker, when it was first given.
    """

    buffer: Buffer
    lease_s: float
    clock: Callable[[], float]
    most: int = 256
    longest: int = 20
    next: int = 0
    open: dict[int, Lease] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    oldest: dict[int, int] = field(default_factory=dict)
    since: dict[int, dict[str, float]] = field(default_factory=dict)

    def assign(self, node: str, version: int, room: int) -> list[int]:
        """Groups that the node begins now, with weights of this version: those that were lost first."""
        self.expire()
        assigned: list[int] = []
        room = min(room, self.most - sum(lease.node == node for lease in self.open.values()))
        free = [group for group in sorted(self.free) if not self._is_overdue(node, group)]
        while len(assigned) < room:
            group = free[0] if free else self.next
            if not self.buffer.may_begin(group, version):
                break
            if free:
                self._take(free.pop(0))
            else:
                self.next += 1
            now = self.clock()
            self.open[group] = Lease(node, now + self.lease_s, version)
            self.since.setdefault(group, {}).setdefault(node, now)
            self.oldest[group] = min(version, self.oldest.get(group, version))
            begun = self.buffer.begun
            begun[version] = max(begun.get(version, 0), group + 1)
            assigned.append(group)
        return assigned

    def renew(self, node: str, holds: Collection[int]) -> list[int]:
        """The node still writes these groups, also those whose lease has ended and that nobody else has: they are its again.

        What it has forgotten, or had too long, is free. Returns those that another has, that were brought, and of which it
        must wait for others.
        """
        until = self.clock() + self.lease_s
        for group in [group for group, lease in self.open.items() if lease.node == node]:
            if group not in holds or self._is_overdue(node, group):
                self._free(group)
        others = []
        for group in sorted(holds):
            if group in self.free and group in self.oldest and not self._is_overdue(node, group):
                self._take(group)
                self.open[group] = Lease(node, until, self.oldest[group])
                self.since.setdefault(group, {}).setdefault(node, self.clock())
            elif group in self.open and self.open[group].node == node:
                self.open[group].until = until
            else:
                others.append(group)
        return others

    def expire(self) -> list[int]:
        """Free the groups of workers that were not heard of in time; returns them."""
        now = self.clock()
        lost = sorted(group for group, lease in self.open.items() if lease.until < now)
        for group in lost:
            self._free(group)
        return lost

    def is_wanted(self, group: int) -> bool:
        """Whether the group was begun, and nobody has brought it yet."""
        return group in self.open or group in self.free

    def finish(self, group: int) -> None:
        """It was brought, by whomever."""
        if self.open.pop(group, None) is None:
            self._take(group)
        self.oldest.pop(group, None)
        self.since.pop(group, None)

    def reopen(self, group: int, oldest: int) -> None:
        """What was brought is no good: another writes it, or who has had its lease before."""
        heapq.heappush(self.free, group)
        self.oldest[group] = oldest

    def _free(self, group: int) -> None:
        del self.open[group]
        heapq.heappush(self.free, group)

    def _take(self, group: int) -> None:
        self.free.remove(group)
        heapq.heapify(self.free)

    def _is_overdue(self, node: str, group: int) -> bool:
        """Whether others may have it first now. After that lease a new count begins."""
        of_group = self.since.get(group, {})
        if node not in of_group:
            return False
        leases = (self.clock() - of_group[node]) / self.lease_s
        if leases > self.longest + 1:
            del of_group[node]
        return self.longest < leases <= self.longest + 1
