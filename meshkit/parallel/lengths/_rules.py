"""Published rules of dynamic context parallelism: FlexSP's groups, ByteScale's capacity units, Zeppelin's zones.

They differ in which documents are cut, over how many ranks, and by what ranks are balanced. Inside of a document all cut it
evenly.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from meshkit.parallel.lengths._costs import LengthCosts
from meshkit.parallel.lengths._even import even_shares
from meshkit.parallel.lengths._plan import Numbers, Placed

HALVINGS = 24  # of the interval in which FlexSP's time is searched


def flexsp(lengths: Numbers, areas: Numbers, *, ranks: int, costs: LengthCosts, tokens_per_rank: int) -> Placed | None:
    """Groups of 1, 2, 4, ... consecutive ranks, each document in one of them, over all of its ranks; None where none fit.

    The least time in which the groups fit on the ranks is searched by halving, and in it, longest first, each document takes
    the emptiest group that ends in time, or opens the smallest that does.
    Source: Wang et al. 2024 (FlexSP), section 4. Its integer programme is solved greedily here.
    """
    per_token = costs.pair_s * areas / np.maximum(lengths, 1) + costs.token_s
    order = np.argsort(-lengths, kind="stable").tolist()
    work = (per_token * lengths).tolist()
    tokens_of = lengths.astype(int).tolist()
    sizes = [1 << power for power in range(ranks.bit_length())]

    def seconds(index: int, size: int) -> float:
        key_s = costs.near_s if size <= costs.node else costs.far_s
        return float(work[index] / size + (0.75 * tokens_of[index] * key_s if size > 1 else 0.0))

    def in_time(limit_s: float) -> list[tuple[int, list[int]]] | None:
        """(size, documents) of each group"""
        groups: list[tuple[int, list[int]]] = []
        free, emptiest = (
            ranks,
            {size: list[tuple[float, int, int]]() for size in sizes},
        )  # heaps (seconds, tokens, group)
        for index in order:
            for size in sizes:
                if tokens_of[index] > size * tokens_per_rank or seconds(index, size) > limit_s:
                    continue
                heap = emptiest[size]
                if heap:
                    used_s, used, group = heap[0]
                    if used_s + seconds(index, size) <= limit_s and used + tokens_of[index] <= size * tokens_per_rank:
                        heappop(heap)
                        groups[group][1].append(index)
                        heappush(heap, (used_s + seconds(index, size), used + tokens_of[index], group))
                        break
                if size <= free:
                    free -= size
                    groups.append((size, [index]))
                    heappush(heap, (seconds(index, size), tokens_of[index], len(groups) - 1))
                    break
            else:
                return None
        return groups

    low, high = sum(work) / ranks, 2 * sum(work) + sum(lengths) * costs.far_s
    best = in_time(high)
    if best is None:
        return None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if (groups := in_time(middle)) is None:
            low = middle
        else:
            best, high = groups, middle
    placed: Placed = [(0, ())] * len(lengths)
    first = 0
    for size, members in sorted(best, key=lambda group: -group[0]):  # so that each is aligned to its size
        for index in members:
            placed[index] = 0, even_shares(tokens_of[index], range(first, first + size))
        first += size
    return placed


def bytescale(
    lengths: Numbers, areas: Numbers, *, ranks: int, costs: LengthCosts, tokens_per_rank: int
) -> tuple[Placed, int] | None:
    """A document takes as many ranks as it has capacities of tokens, and short ones are joined up to one; the rank that has
    least to do takes the next, in a microbatch of its own.

    Returns the places, and the microbatches of the rank with most; None for a document with more tokens than all ranks hold.
    Source: Ge et al. 2025 (ByteScale), sections 4 and 5.
    """
    per_token = costs.pair_s * areas / np.maximum(lengths, 1) + costs.token_s
    tokens_of, work = lengths.astype(int).tolist(), (per_token * lengths).tolist()
    units: list[tuple[float, list[int], int]] = []  # (seconds of a rank, documents, ranks)
    pack: list[int] = []
    for index in np.argsort(-lengths, kind="stable").tolist():
        size = -(-tokens_of[index] // tokens_per_rank)
        if size > ranks:
            return None
        if size > 1:
            key_s = costs.near_s if size <= costs.node else costs.far_s
            units.append((work[index] / size + 0.75 * tokens_of[index] * key_s, [index], size))
            continue
        if pack and sum(tokens_of[each] for each in pack) + tokens_of[index] > tokens_per_rank:
            units.append((sum(work[each] for each in pack), pack, 1))
            pack = []
        pack.append(index)
    if pack:
        units.append((sum(work[each] for each in pack), pack, 1))
    used_s, used = np.zeros(ranks), np.zeros(ranks, dtype=np.int64)
    placed: Placed = [(0, ())] * len(lengths)
    for unit_s, members, size in sorted(units, key=lambda unit: (-unit[2], -unit[0])):
        chosen = np.sort(np.argpartition(used_s, size - 1)[:size]) if size < ranks else np.arange(ranks)
        microbatch = int(used[chosen].max())
        for index in members:
            placed[index] = microbatch, even_shares(tokens_of[index], chosen.tolist())
        used_s[chosen] = used_s[chosen].max() + unit_s
        used[chosen] = microbatch + 1
    return placed, int(used.max(initial=1))


def zeppelin(
    lengths: Numbers, areas: Numbers, *, ranks: int, costs: LengthCosts, tokens_per_rank: int
) -> Placed | None:
    """Zones by length: a document longer than a node's part of the tokens is on whole nodes, one longer than a rank's part on
    ranks of the emptiest node, any other on the rank with the fewest tokens; None where tokens do not fit.

    Its moves of tokens between attention and the rest of a layer are left out: tokens stay where attention has them.
    Source: Chen et al. 2025 (Zeppelin), section 4.
    """
    node = min(costs.node, ranks)
    nodes = [list(range(first, min(first + node, ranks))) for first in range(0, ranks, node)]
    part = max(1, min(-(-int(lengths.sum()) // ranks), tokens_per_rank))
    used = np.zeros(ranks, dtype=np.int64)
    placed: Placed = [(0, ())] * len(lengths)
    local: list[tuple[int, int]] = []
    for index in np.argsort(-lengths, kind="stable").tolist():
        tokens = int(lengths[index])
        if tokens <= part:
            local.append((tokens, index))
            continue
        by_use = sorted(nodes, key=lambda members: int(used[members].sum()) / len(members))
        if tokens > part * node:
            count = min(-(-tokens // (part * node)), len(nodes))
            chosen = sorted(rank for members in by_use[:count] for rank in members)
        else:
            members = by_use[0]
            count = min(-(-tokens // part), len(members))
            chosen = sorted(sorted(members, key=lambda rank: int(used[rank]))[:count])
        placed[index] = 0, even_shares(tokens, chosen)
        for rank, share in placed[index][1]:
            used[rank] += share
    heap = [(int(count), rank) for rank, count in enumerate(used)]
    heapify(heap)
    for tokens, index in local:
        count, rank = heappop(heap)
        placed[index] = 0, ((rank, tokens),)
        used[rank] += tokens
        heappush(heap, (count + tokens, rank))
    return placed if used.max() <= tokens_per_rank else None
