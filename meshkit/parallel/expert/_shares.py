"""Token shares of copied experts (replica load balancing): how many rows of each rank go to which holder of an expert.

Every rank knows all counts, so every rank computes the same shares, and none are sent. Pure integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshkit.parallel.expert._placement import Placement

SWEEPS = 8
"""over copied experts at most; each is levelled given the others, which converges to the least busiest rank"""

Shares = Mapping[int, Sequence[Sequence[int]]]
"""copied expert -> for each source rank, the rows for each holder, in the order of `Placement.holders`"""


def share_rows(
    placement: Placement, counts: Sequence[Sequence[int]], nodes: Sequence[int], per_rank: int = 1
) -> Shares:
    """The shares that make the busiest rank least busy; within them rows stay on their rank, or else on its node.

    counts: for each source its rows of each expert; `per_rank` sources have one rank of ep (those of etp), one after the
    other. nodes: for each rank of ep.
    """
    copied = [expert for expert, ranks in enumerate(placement.copies) if ranks]
    if not copied:
        return {}
    totals = [sum(column) for column in zip(*counts, strict=True)]
    split = level(placement, totals)
    return {
        expert: _to_near(
            [source[expert] for source in counts], split[expert], placement.holders[expert], nodes, per_rank
        )
        for expert in copied
    }


def level(placement: Placement, totals: Sequence[int]) -> dict[int, list[int]]:
    """Rows of each copied expert for each of its holders, so that the busiest rank has as few as can be. totals: of all."""
    loads = [0] * placement.ranks
    split: dict[int, list[int]] = {}
    for expert, holders in enumerate(placement.holders):
        if len(holders) == 1:
            loads[holders[0]] += totals[expert]
        else:
            split[expert] = [0] * len(holders)
    # Blocks of a convex problem (the sum of squares of loads, each expert's rows over its holders), one after the other: its
    # optimum is also that of the largest load. The first sweep fills, busiest experts first; the rest move rows.
    order = sorted(split, key=lambda expert: (-totals[expert], expert))
    for _ in range(SWEEPS):
        changed = False
        for expert in order:
            holders, before = placement.holders[expert], split[expert]
            for holder, rows in zip(holders, before, strict=True):
                loads[holder] -= rows
            after = _poured(totals[expert], [loads[holder] for holder in holders])
            for holder, rows in zip(holders, after, strict=True):
                loads[holder] += rows
            split[expert] = after
            changed = changed or after != before
        if not changed:
            break
    return split


def rank_loads(placement: Placement, totals: Sequence[int]) -> list[int]:
    """Rows that each rank computes."""
    loads = [0] * placement.ranks
    split = level(placement, totals)
    for expert, holders in enumerate(placement.holders):
        for holder, rows in zip(holders, split.get(expert, [totals[expert]]), strict=True):
            loads[holder] += rows
    return loads


def _poured(rows: int, loads: Sequence[int]) -> list[int]:
    """Rows for each of the vessels, poured so that they end as level as can be (waterfilling); ties to the first."""
    order = sorted(range(len(loads)), key=lambda index: (loads[index], index))
    out = [0] * len(loads)
    left, filled = rows, 0
    for filled in range(1, len(order) + 1):
        # The lowest `filled` vessels rise together to the next one's load.
        here = loads[order[filled - 1]]
        rise = (loads[order[filled]] - here) * filled if filled < len(order) else left
        if rise >= left:
            break
        left -= rise
    base, more = divmod(left, filled)
    top = loads[order[filled - 1]] + base
    for place, index in enumerate(order[:filled]):
        out[index] = top - loads[index] + (place < more)
    return out


def _to_near(
    rows: Sequence[int], wanted: Sequence[int], holders: Sequence[int], nodes: Sequence[int], per_rank: int
) -> list[list[int]]:
    """For each source the rows for each holder: first to itself, then to its node, then in order."""
    left, room = list(rows), list(wanted)
    out = [[0] * len(holders) for _ in rows]
    for near in (
        lambda source, holder: source == holder,
        lambda source, holder: nodes[source] == nodes[holder],
        lambda source, holder: True,
    ):
        for source in range(len(rows)):
            for place, holder in enumerate(holders):
                if left[source] and room[place] and near(source // per_rank, holder):
                    moved = min(left[source], room[place])
                    out[source][place] += moved
                    left[source] -= moved
                    room[place] -= moved
    return out
