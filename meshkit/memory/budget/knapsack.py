"""The cheapest choice for every block within a number of bytes: a multiple-choice knapsack, solved exactly.

Blocks keep bytes all at once. What a block needs only while its backward runs, one block needs at a time, and beside it there
are the bytes of blocks that are on their way to the host or back.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Option:
    """One way to treat a block. bytes: kept on the device from forward to backward; passing: more, while its backward runs;
    seconds: what it costs a step; moving: bytes that wait elsewhere, which are part of `passing`.
    """

    name: str
    bytes: int
    seconds: float
    passing: int = 0
    moving: int = 0


GRAINS = 1e15  # of a second

Cost = tuple[float, int]
"""Grains of seconds, and of equals the fewest bytes moved."""


def most(options: Sequence[Option], beside: int = 1) -> int:
    """Bytes at one time: what all keep, what the largest needs besides, and `beside` of the largest that is moved."""
    passing = max((option.passing for option in options), default=0)
    moving = max((option.moving for option in options), default=0)
    return sum(option.bytes for option in options) + passing + beside * moving


def cheapest(blocks: Sequence[Sequence[Option]], budget: int, beside: int = 1) -> list[int] | None:
    """The index of each block's option such that `most` of them is at most the budget, and the seconds the least. None if
    there is no such choice. Of equals the one that moves least, then the first option of the first block wins.

    beside: how many blocks' moved bytes are on the device beside those of the one whose backward runs.
    """
    # Whole numbers: sums of equal blocks are then equal in whatever order, on every version and machine.
    blocks = [[replace(option, seconds=round(option.seconds * GRAINS)) for option in options] for options in blocks]
    best: tuple[Cost, list[int]] | None = None
    for room, allowed in _limits(blocks, beside):
        found = _least(allowed, budget - room, math.inf if best is None else best[0][0])
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return best and best[1]


def smallest(blocks: Sequence[Sequence[Option]], beside: int = 1) -> tuple[int, int]:
    """What the choice that takes the fewest bytes keeps, and what it needs besides."""
    found = (
        (sum(min(option.bytes for _, option in options) for options in allowed), room)
        for room, allowed in _limits(blocks, beside)
    )
    return min(found, key=sum)


def _limits(blocks: Sequence[Sequence[Option]], beside: int) -> Iterator[tuple[int, list[list[tuple[int, Option]]]]]:
    """Room for what is there for a while, the least first, and the options that get on with it."""
    every = [option for options in blocks for option in options]
    pairs = {(a.passing, b.moving) for a in set(every) for b in set(every) if b.moving <= a.passing} or {(0, 0)}
    for passing, moving in sorted(pairs, key=lambda pair: (pair[0] + beside * pair[1], pair)):
        allowed = [
            [(at, o) for at, o in enumerate(options) if o.passing <= passing and o.moving <= moving]
            for options in blocks
        ]
        if all(allowed):
            yield passing + beside * moving, allowed


def _least(blocks: Sequence[Sequence[tuple[int, Option]]], budget: int, enough: float) -> tuple[Cost, list[int]] | None:
    """Block after block, of all partial choices those that no other beats in both bytes and cost, and that may still come to
    at most `enough` seconds, or to what a quick choice does.
    """
    rest = _relaxed(blocks)
    if budget < rest[0].bytes:
        return None
    enough = min(enough, rest[0].quick(budget)) * (1 + SLACK)
    front: list[tuple[int, float, int, Any]] = [(0, 0.0, 0, None)]
    for options, after in zip(blocks, rest[1:], strict=True):
        reached = [
            (size + option.bytes, seconds + option.seconds, moved + option.moving, (at, trail))
            for size, seconds, moved, trail in front
            for at, option in options
        ]
        reached.sort(key=lambda state: state[:3])
        front = []
        for state in reached:
            if (not front or state[1:3] < front[-1][1:3]) and state[1] + after.bound(budget - state[0]) <= enough:
                front.append(state)
    if not front:
        return None
    _, seconds, moved, trail = front[-1]
    chosen: list[int] = []
    while trail is not None:
        at, trail = trail
        chosen.append(at)
    return (seconds, moved), chosen[::-1]


SLACK = 1e-9  # of sums in another order


class _Relaxed:
    """The seconds of blocks whose options could be mixed in any parts (the linear relaxation): a bound from below.

    steps: from the fewest bytes on, seconds saved, bytes more, and whose; those that save most a byte first.
    """

    def __init__(self, bytes: int, seconds: float, steps: list[tuple[float, int, float, int]]) -> None:
        self.bytes, self.seconds, self.steps = bytes, seconds, steps
        self._bytes = list(itertools.accumulate((step[1] for step in steps), initial=bytes))
        self._seconds = list(itertools.accumulate((-step[2] for step in steps), initial=seconds))

    def bound(self, budget: int) -> float:
        if budget < self.bytes:
            return math.inf
        at = bisect.bisect_right(self._bytes, budget) - 1
        if at == len(self.steps):
            return self._seconds[at]
        return self._seconds[at] - self.steps[at][2] * (budget - self._bytes[at]) / self.steps[at][1]

    def quick(self, budget: int) -> float:
        """Of a choice that fits: every step that still does, none after one of the same block that did not."""
        if budget < self.bytes:
            return math.inf
        left, seconds, done = budget - self.bytes, self.seconds, set[int]()
        for _, more, saved, block in self.steps:
            if block not in done and more <= left:
                left, seconds = left - more, seconds - saved
            else:
                done.add(block)
        return seconds


def _relaxed(blocks: Sequence[Sequence[tuple[int, Option]]]) -> list[_Relaxed]:
    """Of the blocks from each on; the last is of none."""
    found = [_Relaxed(0, 0.0, [])]
    for block in reversed(range(len(blocks))):
        hull: list[Option] = []
        for _, option in sorted(blocks[block], key=lambda each: (each[1].bytes, each[1].seconds)):
            if hull and option.seconds >= hull[-1].seconds:
                continue
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], option):
                hull.pop()
            hull.append(option)
        own = [(-_slope(a, b), b.bytes - a.bytes, a.seconds - b.seconds, block) for a, b in itertools.pairwise(hull)]
        after = found[-1]
        steps = sorted([*own, *after.steps])
        found.append(_Relaxed(after.bytes + hull[0].bytes, after.seconds + hull[0].seconds, steps))
    return found[::-1]


def _slope(less: Option, more: Option) -> float:
    """Seconds saved a byte."""
    return (less.seconds - more.seconds) / (more.bytes - less.bytes)
