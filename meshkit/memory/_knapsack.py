"""The cheapest choice for every block within a number of bytes: a multiple-choice knapsack, solved exactly.

Blocks keep bytes all at once; what a block needs only while its backward runs, one block needs at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """One way to treat a block. bytes: kept from forward to backward; passing: more, while its backward runs; seconds: what
    it costs a step.
    """

    name: str
    bytes: int
    seconds: float
    passing: int = 0


def cheapest(blocks: Sequence[Sequence[Option]], budget: int) -> list[int] | None:
    """The index of each block's option such that the sum of bytes and the largest `passing` are at most the budget, and
    the seconds the least. None if there is no such choice. Of equals the first option of the first block wins.
    """
    best: tuple[float, list[int]] | None = None
    for most in sorted({option.passing for options in blocks for option in options} or {0}):
        allowed = [[(at, o) for at, o in enumerate(options) if o.passing <= most] for options in blocks]
        found = _least(allowed, budget - most) if all(allowed) else None
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return best and best[1]


def _least(blocks: Sequence[Sequence[tuple[int, Option]]], budget: int) -> tuple[float, list[int]] | None:
    """Block after block, of all partial choices those that no other beats in both bytes and seconds."""
    front: list[tuple[int, float, Any]] = [(0, 0.0, None)] if budget >= 0 else []
    for options in blocks:
        reached = [
            (size + option.bytes, seconds + option.seconds, (at, trail))
            for size, seconds, trail in front
            for at, option in options
            if size + option.bytes <= budget
        ]
        reached.sort(key=lambda state: state[:2])
        front = []
        for state in reached:
            if not front or state[1] < front[-1][1]:
                front.append(state)
    if not front:
        return None
    _, seconds, trail = front[-1]
    chosen: list[int] = []
    while trail is not None:
        at, trail = trail
        chosen.append(at)
    return seconds, chosen[::-1]
