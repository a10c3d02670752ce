"""Buffer of rollouts, the rule: which groups may be begun, and which a training step takes. Numbers only, no communication.

A group is what is made of one first sample, such as all answers to a prompt. Groups are numbered through all iterations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field


class Groups:
    """The numbers of groups by iteration. size(iteration): how many it has. total: iterations."""

    def __init__(self, size: Callable[[int], int], total: int) -> None:
        self._size, self._total, self._ends = size, total, [0]

    def before(self, iteration: int) -> int:
        """The number of groups in the iterations before this one; of all, from the last on."""
        iteration = min(iteration, self._total)
        while len(self._ends) <= iteration:
            self._ends.append(self._ends[-1] + self._size(len(self._ends) - 1))
        return self._ends[iteration]

    def place(self, group: int) -> tuple[int, int]:
        """(the iteration that a group comes from, its index there)."""
        while self._ends[-1] <= group:
            assert len(self._ends) <= self._total, f"group {group} is after the last one"
            self.before(len(self._ends))
        iteration = bisect_right(self._ends, group) - 1
        return iteration, group - self._ends[iteration]


@dataclass
class Buffer:
    """Begun groups, in their order, until training takes them.

    begun: by version of the weights, how many groups had been begun before the next version came. taken: those after `first`,
    the first group that was not taken. step: the next that takes groups.
    With at most `staleness` = k updates between the weights that write a token and those that learn from it, a group that
    was begun by weights of version v is taken by step v + k.
    """

    groups: Groups
    staleness: int
    ready: set[int] = field(default_factory=set)
    first: int = 0
    taken: set[int] = field(default_factory=set)
    begun: dict[int, int] = field(default_factory=dict)
    step: int = 0

    def limit(self, version: int) -> int:
        """How many groups may have been begun by weights of this version."""
        return self.groups.before(version + self.staleness + 1)

    def may_begin(self, group: int, version: int) -> bool:
        """Whether weights of this version, perhaps not the newest, may begin a group, perhaps not the next one.

        Steps up to version + staleness that have not taken theirs must have room for it and for all before it that wait.
        """
        waiting = sum(each not in self.taken for each in range(self.first, group + 1))
        return waiting <= self.groups.before(version + self.staleness + 1) - self.groups.before(self.step)

    def take(self, step: int) -> list[int] | None:
        """The groups that training step `step` learns from, or None as long as it must wait.

        The first ones in order that are ready, as many as an iteration has. It waits for an earlier one only where a later
        step could not take all that would be too old after it.
        """
        count = self.groups.before(step + 1) - self.groups.before(step)
        chosen = sorted(self.ready)[:count]
        if len(chosen) < count or not self._in_time(self.taken | set(chosen), step):
            return None
        self.step = step + 1
        self.ready -= set(chosen)
        self.taken |= set(chosen)
        while self.first in self.taken:
            self.taken.remove(self.first)
            self.first += 1
        self.begun = {version: begun for version, begun in self.begun.items() if begun > self.first}
        return chosen

    def _in_time(self, taken: set[int], step: int) -> bool:
        """Whether the steps after this one can take all groups in time."""
        # [Note: none becomes too old]
        # Steps step + 1 to s take before(s + 1) - before(step + 1) groups. What was begun by version s - k must be among
        # them. What later versions begin needs no look: with it all that was taken is begun, and `limit` lets no more than
        # before(s + 1) be begun in all. So a choice that is in time now leaves one at every later step.
        return all(
            sum(group not in taken for group in range(self.first, begun))
            <= max(0, self.groups.before(version + self.staleness + 1) - self.groups.before(step + 1))
            for version, begun in self.begun.items()
        )
