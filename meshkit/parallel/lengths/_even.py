"""Static context parallelism: groups of equally many consecutive ranks, every document cut evenly over one of them."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from meshkit.parallel.lengths._costs import LengthCosts
from meshkit.parallel.lengths._plan import Numbers, Placed, Shares


def even_shares(tokens: int, ranks: range | list[int]) -> Shares:
    """Of a document on all of the ranks, equal but for a token."""
    edges = [tokens * part // len(ranks) for part in range(len(ranks) + 1)]
    counts = (after - first for first, after in pairwise(edges))
    return tuple((rank, count) for rank, count in zip(ranks, counts, strict=True) if count)


def even_groups(
    lengths: Numbers, areas: Numbers, *, ranks: int, size: int, costs: LengthCosts, tokens_per_rank: int
) -> tuple[float, list[int]] | None:
    """(seconds of the slowest rank, group of each document) for groups of `size` ranks; None where tokens do not fit.

    The documents that take longest come first, each to the group that has least to do (LPT).
    """
    # The first rank of a group receives most: all keys but its own.
    key_s = (costs.near_s if costs.node % size == 0 else costs.far_s) * (1 - 1 / size)
    seconds = (costs.pair_s * areas + costs.token_s * lengths) / size + key_s * lengths
    groups = [(0.0, 0, group) for group in range(ranks // size)]  # a heap
    group_of = [0] * len(lengths)
    full: list[tuple[float, int, int]] = []
    for index in np.argsort(-seconds, kind="stable").tolist():
        tokens = int(lengths[index])
        while groups and groups[0][1] + tokens > tokens_per_rank * size:
            full.append(heappop(groups))
        if not groups:
            return None
        used_s, used, group = heappop(groups)
        group_of[index] = group
        heappush(groups, (used_s + float(seconds[index]), used + tokens, group))
        for entry in full:
            heappush(groups, entry)
        full.clear()
    return max(used_s for used_s, _, _ in groups), group_of


def placed_evenly(lengths: Numbers, group_of: list[int], size: int) -> Placed:
    """The places that `even_groups` found."""
    placed: Placed = []
    for index, (tokens, group) in enumerate(zip(lengths, group_of, strict=True)):
        ranks = list(range(group * size, (group + 1) * size))
        # Each time another rank is the first of a document, which receives most.
        first = index % size
        placed.append((0, even_shares(int(tokens), ranks[first:] + ranks[:first])))
    return placed
