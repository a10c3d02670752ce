"""Stage partition (min-max, linear partition): consecutive blocks shared so that the slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf


def min_max_partition(
    seconds: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Blocks of each stage, at least one each: exact, by dynamic programming. first, last: what those stages do besides.

    Of partitions that are as fast, the one whose later stages are shortest. len(seconds) >= stages >= 1.
    """
    assert 1 <= stages <= len(seconds)
    total = [0.0, *accumulate(seconds)]
    count = len(seconds)
    # best[n]: (slowest stage, where the last one begins) of the first n blocks in so many stages
    best = [(total[n] + first, 0) if n else (inf, 0) for n in range(count + 1)]
    tables = [best]
    for stage in range(1, stages):
        more = last if stage == stages - 1 else 0.0
        best = [(inf, 0)] * (count + 1)
        for n in range(stage + 1, count + 1):
            best[n] = min((max(tables[-1][at][0], total[n] - total[at] + more), -at) for at in range(stage, n))
        tables.append(best)
    if stages == 1:
        return (count,)
    counts: list[int] = []
    end = count
    for table in reversed(tables[1:]):
        begin = -table[end][1]
        counts.append(end - begin)
        end = begin
    return (end, *reversed(counts))
