"""An exact multiple-choice knapsack solver: the cheapest option for every block within a number of bytes.

Bytes that blocks keep add up over all blocks. Bytes needed only during a block's backward count once, for the largest block,
since one backward runs at a time. Added to them are bytes of blocks whose copies to or from the host are under way.
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
    """One way to treat a block.

    bytes: kept on the device from forward to backward. seconds: added to a step. passing: additional bytes while its backward
    runs. moving: bytes that wait off the device, a part of `passing`.
    """

    name: str
    bytes: int
    seconds: float
    passing: int = 0
    moving: int = 0


GRAINS = 1e15  # of a second

Cost = tuple[float, int]
"""(grains of seconds, bytes moved): compared in this order, so ties go to the choice that moves less."""


def most(options: Sequence[Option], beside: int = 1) -> int:
    """Peak bytes: kept by all, plus the largest `passing`, plus `beside` times the largest `moving`."""
    passing = max((option.passing for option in options), default=0)
    moving = max((option.moving for option in options), default=0)
    return sum(option.bytes for option in options) + passing + beside * moving


def cheapest(blocks: Sequence[Sequence[Option]], budget: int, beside: int = 1) -> list[int] | None:
    """The index of each block's option: the least seconds of all choices whose `most` is within the budget, None if none is.

    Ties go to the choice that moves the fewest bytes, then to the earlier option of the first block that differs.
    beside: how many other blocks' moved bytes are on the device while one block's backward runs.
    """
    # Whole numbers: sums of equal blocks are then equal in whatever order, on every version and machine.
    blocks = [[replace(option, seconds=round(option.seconds * GRAINS)) for option in options] for options in blocks]
    best: tuple[Cost, list[int]] | None = None
    for room, allowed in _limits(blocks, beside):
        candidate = _least(allowed, budget - room, math.inf if best is None else best[0][0])
        if candidate is not None and (best is None or candidate[0] < best[0]):
            best = candidate
    return best and best[1]


def smallest(blocks: Sequence[Sequence[Option]], beside: int = 1) -> tuple[int, int]:
    """(bytes kept, bytes needed besides) of the choice with the lowest peak."""
    peaks = (
        (sum(min(option.bytes for _, option in options) for options in allowed), room)
        for room, allowed in _limits(blocks, beside)
    )
    return min(peaks, key=sum)


def _limits(blocks: Sequence[Sequence[Option]], beside: int) -> Iterator[tuple[int, list[list[tuple[int, Option]]]]]:
    """Yields (room for passing and moving bytes, the options that need no more), smallest room first.

    With the room fixed, only kept bytes are left to choose by: a plain knapsack.
    """
    every = [option for options in blocks for option in options]
    # The two largest are of some option each, so these pairs are all that can be.
    pairs = {(a.passing, b.moving) for a in set(every) for b in set(every) if b.moving <= a.passing} or {(0, 0)}
    for passing, moving in sorted(pairs, key=lambda pair: (pair[0] + beside * pair[1], pair)):
        allowed = [
            [(at, o) for at, o in enumerate(options) if o.passing <= passing and o.moving <= moving]
            for options in blocks
        ]
        if all(allowed):
            yield passing + beside * moving, allowed


def _least(blocks: Sequence[Sequence[tuple[int, Option]]], budget: int, enough: float) -> tuple[Cost, list[int]] | None:
    """Dynamic programming over blocks, exact: (cost, options), or None if nothing fits.

    Keeps the Pareto front of partial choices in bytes and cost, without those that cannot end below `enough` seconds or below
    a quick feasible choice.
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
        # In order of bytes a state is kept only if it is cheaper than all that need less, and may still end below `enough`.
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


SLACK = 1e-9  # relative: sums in another order round differently, and no optimum may be pruned for that


class _Relaxed:
    """The linear relaxation, in which a block may mix its options: a lower bound on seconds.

    bytes, seconds: of the choice with the fewest bytes. steps: (slope, additional bytes, seconds saved, block), those that
    save most per byte first.
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
        """Seconds of a greedy feasible choice: each step that fits, but none of a block after one of it that did not."""
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
    """The relaxations of blocks[0:], blocks[1:], ..., and of no blocks."""
    # From the last block on, since the search asks what the blocks after the present one cost at least.
    relaxed = [_Relaxed(0, 0.0, [])]
    for block in reversed(range(len(blocks))):
        # The lower convex hull of (bytes, seconds): mixtures of a block's options lie on or above it.
        hull: list[Option] = []
        for _, option in sorted(blocks[block], key=lambda indexed: (indexed[1].bytes, indexed[1].seconds)):
            if hull and option.seconds >= hull[-1].seconds:
                continue
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], option):
                hull.pop()
            hull.append(option)
        block_steps = [
            (-_slope(a, b), b.bytes - a.bytes, a.seconds - b.seconds, block) for a, b in itertools.pairwise(hull)
        ]
        after = relaxed[-1]
        steps = sorted([*block_steps, *after.steps])
        relaxed.append(_Relaxed(after.bytes + hull[0].bytes, after.seconds + hull[0].seconds, steps))
    return relaxed[::-1]


def _slope(less: Option, more: Option) -> float:
    """Seconds saved per additional byte."""
    return (less.seconds - more.seconds) / (more.bytes - less.bytes)
