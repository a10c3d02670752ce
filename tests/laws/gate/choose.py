"""Which cells are run: few in which every two features meet, or as many as there is time for."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, count, islice

from tests.laws.gate.cell import Cell, draw

# Of how many ranks, in turn. Two ranks are cheap, four hold three axes, three divide nothing.
WORLDS = (2, 4, 2, 4, 3, 2, 4, 1, 2, 4, 2, 4, 8)
Seed = tuple[int, int]
"""(seed, ranks): `draw(*seed)` is the cell."""


def seeds(first: int = 0) -> Iterator[Seed]:
    """Without end."""
    return ((seed, WORLDS[seed % len(WORLDS)]) for seed in count(first))


def tuples(cell: Cell, size: int) -> set[tuple[str, ...]]:
    """Which so many features meet in a cell."""
    return set(combinations(sorted(cell.features()), size))


@cache
def covering(cells: int, among: int, draw: Callable[[int, int], Cell] = draw, fewest: int = 1) -> tuple[Seed, ...]:
    """So many of the first `among` draws: first those in which any two features meet, then others on few ranks.

    fewest: ranks of a cell.

    Greedy by the pairs that a cell meets first, for each rank that it needs.
    """
    drawn = {seed: draw(*seed) for seed in islice(seeds(), among) if seed[1] >= fewest}
    meets = {seed: set() if cell.refusals() else tuples(cell, 2) for seed, cell in drawn.items()}
    met: set[tuple[str, ...]] = set()
    queue = [(-len(pairs) / seed[1], seed) for seed, pairs in meets.items()]
    heapq.heapify(queue)
    chosen: list[Seed] = []
    while queue and len(chosen) < cells:
        _, seed = heapq.heappop(queue)
        worth = -len(meets[seed] - met) / seed[1]  # it can only have fallen
        if queue and worth > queue[0][0]:
            heapq.heappush(queue, (worth, seed))
        elif worth or seed[1] < 4:
            chosen.append(seed)
            met |= meets[seed]
    return tuple(sorted(chosen, key=lambda seed: (seed[1], seed[0])))
