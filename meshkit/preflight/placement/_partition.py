"""Stage partition (min-max, linear partition): consecutive blocks shared so that the slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np


def min_max_partition(
    seconds: Sequence[float],
    stages: int,
    *,
    first: float = 0.0,
    last: float = 0.0,
    speeds: Sequence[float] | None = None,
    most: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Blocks of each stage, at least one each: exact, by dynamic programming. first, last: what those stages do besides.
    speeds: of each stage's device; None, they are alike. most: blocks of each stage; None, any number.

    Of partitions that are as fast, the one whose later stages are shortest. len(seconds) >= stages >= 1; each of most is 1 or
    more, and all of them hold len(seconds).
    """
    assert 1 <= stages <= len(seconds)
    assert most is None or (min(most) >= 1 and sum(most) >= len(seconds)), "no partition has so few blocks"
    if stages == 1:
        return (len(seconds),)
    speed = np.ones(stages) if speeds is None else np.array(speeds)
    total = np.array([0.0, *accumulate(seconds)])
    count = len(seconds)
    begins = np.arange(count + 1)
    # slowest[n]: of the first n blocks in so many stages the slowest one's seconds, where the last begins in begin[n].
    caps = [count] * stages if most is None else most
    slowest = np.where((begins > 0) & (begins <= caps[0]), (total + first) / speed[0], np.inf)
    tables = []
    for stage in range(1, stages):
        own = (total[:, None] - total[None, :] + (last if stage == stages - 1 else 0.0)) / speed[stage]
        length = begins[:, None] - begins[None, :]
        both = np.where((length > 0) & (length <= caps[stage]), np.maximum(slowest[None, :], own), np.inf)
        begin = count - both[:, ::-1].argmin(axis=1)  # the last of those that are as fast
        slowest = both[begins, begin]
        tables.append(begin)
    counts: list[int] = []
    end = count
    for begin in reversed(tables):
        counts.append(end - int(begin[end]))
        end = int(begin[end])
    return (end, *reversed(counts))
