"""Jitter: a synchronous step takes as long as its slowest rank, E[max of n]."""

from __future__ import annotations

from math import erfc, sqrt

WIDTH, CELLS = 12.0, 4800  # of the integral; halving a cell changes no digit of those that are printed


def expected_max(ranks: int) -> float:
    """Mean of the largest of n independent standard normals: 0 for 1, 1/√π for 2; grows as sqrt(2 ln n).

    Source: E[max] is the integral of 1 - Φ(x)^n over x > 0, less that of Φ(x)^n over x < 0.
    """
    if ranks == 1:
        return 0.0
    cell = WIDTH / CELLS
    total = 0.0
    for index in range(CELLS):
        above = 0.5 * erfc((index + 0.5) * cell / sqrt(2))  # 1 - Φ(x), and Φ(-x)
        total += 1.0 - (1.0 - above) ** ranks - above**ranks
    return total * cell
