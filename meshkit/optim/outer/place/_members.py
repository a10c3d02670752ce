"""A replica as a meeting place sees it: its ranks' connections, whether it counts, and what it has said."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

Standing = Literal["coming", "ready", "in", "late"]
"""coming: its ranks are not all there. ready: waits for the others' state. in: counts at the next meeting. late: the others
went on without it, and it does not know yet"""


@dataclass(kw_only=True)
class Here:
    """What a rank says at a meeting. key: which one it is, by its own count. last: who comes may get the state after it."""

    key: str
    last: bool
    finite: bool


@dataclass(kw_only=True, eq=False)
class Member:
    """One replica, in one of its lives. newest: (next meeting, steps) of its state; the greater is the newer."""

    slot: int
    token: str
    host: str
    ranks: int
    connections: dict[int, int] = field(default_factory=dict)
    """rank -> connection"""
    heard: dict[int, float] = field(default_factory=dict)
    """rank -> when it last said something"""
    standing: Standing = "coming"
    facts: dict[int, dict[str, str]] = field(default_factory=dict)
    newest: tuple[int, int] = (0, 0)
    can_go_back: bool = False
    """to outer parameters, from values that are not finite"""
    is_poisoned: bool = False
    """its values are not finite: it gives its state to nobody"""
    here: dict[int, Here] = field(default_factory=dict)
    done: dict[int, str] = field(default_factory=dict)
    """rank -> "" or why its exchange failed, in this attempt"""
    reason: str = ""
    """why it is late"""
    giver: Member | None = None
    """who hands its state on to this one, in the group of that name"""
    group: str = ""

    def __str__(self) -> str:
        return f"replica {self.slot} on {self.host}"

    @property
    def has_come(self) -> bool:
        return len(self.here) == self.ranks

    @property
    def key(self) -> str:
        """Of the meeting that it is at."""
        return next(each.key for each in self.here.values())

    def is_silent(self, now: float, limit_s: float) -> bool:
        """Whether one of its ranks is."""
        return now - min(self.heard.values()) > limit_s

    def greet(self, rank: int, facts: dict[str, str], newest: tuple[int, int], *, can_go_back: bool) -> bool:
        """A rank is ready for the others' state; whether all are."""
        if self.standing != "coming":  # it starts anew in this life: what it had said holds no more
            self.standing, self.facts = "coming", {}
        self.facts[rank], self.newest, self.can_go_back = facts, newest, can_go_back
        self.here, self.done = {}, {}
        return len(self.facts) == self.ranks


def out_of_turn(members: list[Member]) -> tuple[list[Member], str]:
    """(those that are at another meeting than most, that of most); of as many, the one with the lowest slot decides."""
    counts = Counter(member.key for member in sorted(members, key=lambda each: each.slot))
    (most, _), *_ = counts.most_common()
    return [member for member in members if member.key != most], most


def difference(member: Member, other: Member) -> str:
    """The first fact in which a replica differs from another, or ""."""
    if member.ranks != other.ranks:
        return f"it has {member.ranks} ranks, and {other} has {other.ranks}"
    for rank in range(member.ranks):
        mine, theirs = member.facts.get(rank, {}), other.facts.get(rank, {})
        for name in {**theirs, **mine}:
            if mine.get(name) != theirs.get(name):
                return f"its {name} is {_short(mine.get(name))}, and {_short(theirs.get(name))} on {other}"
    return ""


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
