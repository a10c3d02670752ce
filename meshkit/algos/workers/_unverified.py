"""Groups that workers brought and no validator has passed: who verifies which, and whose work is not taken any more.

Numbers only, no communication. A copy of a group that came has a ticket of its own: what is said of one that failed, and was
written anew since, is not said of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from meshkit.algos.dataflow import Sample
from meshkit.algos.rollout import FingerprintBounds
from meshkit.algos.workers._leases import Lease
from meshkit.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class VerifyPolicy:
    """How rollouts are verified before they are learnt.

    secret: of validators, which workers do not know. fingerprint_bytes: of all answers to a prompt, the most. failures:
    groups of a worker that do not pass, after which it gets no more work. bounds: as of `verify_rollouts`.
    Raises: PlanError for an empty secret, and failures below 1.
    """

    # [Note: two failed groups]
    # An honest worker may fail once: bounds in 16 bits are of rounding that was seen, not of all that can be. Twice is no
    # chance, and more would be paid for: what a cheat brings is never learnt, but it is written, verified and written anew.
    secret: str
    fingerprint_bytes: int
    failures: int = 2
    bounds: FingerprintBounds | None = None

    def __post_init__(self) -> None:
        if not self.secret:
            raise PlanError("validators are known by a secret, which is empty. Give VerifyPolicy(secret=) a text.")
        if self.failures < 1:
            raise PlanError(f"VerifyPolicy(failures={self.failures}): give at least 1.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Brought:
    """A copy of a group. node: the worker that brought it. oldest: the least version that the group was begun with."""

    group: int
    node: str
    oldest: int
    samples: list[Sample]


@dataclass
class Unverified:
    """What waits for a verdict, by ticket. A validator that is not heard of for `lease_s` loses what it verifies to others.

    failures: groups of a worker that fail, after which nothing of it is taken. failed: the reasons, by worker.
    """

    failures: int
    lease_s: float
    clock: Callable[[], float]
    waiting: dict[int, Brought] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    _open: dict[int, Lease] = field(default_factory=dict)
    _next: int = 0

    def add(self, brought: Brought) -> None:
        self.waiting[self._next] = brought
        self._next += 1

    def assign(self, validator: str, room: int) -> list[int]:
        """Tickets that the validator verifies now, of the first groups that nobody verifies."""
        now = self.clock()
        free = [each for each in self.waiting if each not in self._open or self._open[each].until < now]
        chosen = sorted(free, key=lambda ticket: self.waiting[ticket].group)[: max(room, 0)]
        self._open |= {ticket: Lease(validator, now + self.lease_s, 0) for ticket in chosen}
        return chosen

    def renew(self, validator: str, holds: Collection[int]) -> None:
        """The validator still verifies these, and none of its others."""
        until = self.clock() + self.lease_s
        for ticket in [ticket for ticket, lease in self._open.items() if lease.node == validator]:
            if ticket in holds:
                self._open[ticket].until = until
            else:
                del self._open[ticket]

    def passes(self, ticket: int) -> Brought | None:
        """The copy, which may be learnt; None if it does not wait any more."""
        self._open.pop(ticket, None)
        return self.waiting.pop(ticket, None)

    def fails(self, ticket: int, why: str) -> list[Brought]:
        """What is to be written anew: the copy, and all of its worker's if that is refused now; none if it does not wait."""
        brought = self.passes(ticket)
        if brought is None:
            return []
        node = brought.node
        self.failed.setdefault(node, []).append(f"group {brought.group}: {why}")
        others = [each for each, other in self.waiting.items() if other.node == node and self.refuses(node)]
        return [brought, *filter(None, map(self.passes, others))]

    def refuses(self, node: str) -> bool:
        """Whether nothing of this worker is taken any more."""
        return len(self.failed.get(node, ())) >= self.failures
