"""Choosing an expert placement (EPLB, Hecate): copies of busy experts by load and link, owners by load. Pure and greedy.

Loads are rows of each expert that are expected: the sums of the last steps. All ranks have the same, so they choose the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshkit.parallel.expert._placement import Placement
from meshkit.parallel.expert._shares import level

ALMOST = 0.9
"""a copy or an owner on the same node is preferred to a farther one that takes up to so much of what the best would"""


def choose_copies(
    placement: Placement, totals: Sequence[int], nodes: Sequence[int], *, most: int, target: float
) -> Placement:
    """The placement with copies added, one by one, until the busiest rank is expected to have `target` times the mean.

    Each copy takes rows off the busiest rank: of the expert there that has most, to a rank with fewer rows than the mean,
    its owner's node first if a rank there can take nearly as many as any. So it ends after few copies.
    nodes: for each rank of ep. most: copies that a rank may get.
    """
    copies = [list(ranks) for ranks in placement.copies]
    mean = sum(totals) / placement.ranks
    room = [most - len(copied) for copied in placement.copied]
    while True:
        current = placement.with_copies(copies)
        rows = _rows(current, totals)
        loads = [sum(on_rank.values()) for on_rank in rows]
        if max(loads) <= target * mean:
            return current
        chosen = _best_copy(current, rows, loads, room, mean, nodes)
        if chosen is None:
            return current
        expert, rank = chosen
        copies[expert] = sorted([*copies[expert], rank])
        room[rank] -= 1


def _rows(placement: Placement, totals: Sequence[int]) -> list[dict[int, int]]:
    """For each rank the rows of each expert that it computes."""
    rows: list[dict[int, int]] = [{} for _ in range(placement.ranks)]
    split = level(placement, totals)
    for expert, holders in enumerate(placement.holders):
        if len(holders) == 1:
            rows[holders[0]][expert] = totals[expert]
            continue
        for holder, share in zip(holders, split[expert], strict=True):
            rows[holder][expert] = share
    return rows


def _best_copy(
    placement: Placement,
    rows: Sequence[dict[int, int]],
    loads: Sequence[int],
    room: Sequence[int],
    mean: float,
    nodes: Sequence[int],
) -> tuple[int, int] | None:
    """(expert, rank) of the copy that takes most rows off the busiest rank that can be helped; None if none can."""
    for busiest in sorted(range(placement.ranks), key=lambda rank: (-loads[rank], rank)):
        if loads[busiest] <= mean:
            return None
        found: list[tuple[float, bool, int, int]] = []
        for expert, here in rows[busiest].items():
            for rank in range(placement.ranks):
                takes = min(here, loads[busiest] - mean, mean - loads[rank])
                if takes > 0 and room[rank] > 0 and rank not in placement.holders[expert]:
                    near = nodes[rank] == nodes[placement.owners[expert]]
                    found.append((takes, near, expert, rank))
        if found:
            best = max(takes for takes, *_ in found)
            almost = [each for each in found if each[0] >= ALMOST * best]
            _, _, expert, rank = max(almost, key=lambda each: (each[1], each[0], -loads[each[3]], -each[2], -each[3]))
            return expert, rank
    return None


def choose_owners(
    owners: Sequence[int], totals: Sequence[int], nodes: Sequence[int], *, ranks: int, most: int | None = None
) -> tuple[int, ...]:
    """Owners that even out the loads of ranks, from these by as few changes as pay.

    Two ranks exchange an expert each, or with `most` one gives another an expert, so that a rank owns up to `most`, and at
    least one. The change that evens most is made first, within a node if it evens nearly as much. nodes: for each rank.
    """
    now = list(owners)
    loads = [0.0] * ranks
    for expert, owner in enumerate(now):
        loads[owner] += totals[expert]
    mean = sum(loads) / ranks
    while True:
        busiest = max(range(ranks), key=lambda rank: (loads[rank], -rank))
        counts = [now.count(rank) for rank in range(ranks)]
        found: list[tuple[float, bool, int, int | None, int]] = []
        for expert in (e for e, owner in enumerate(now) if owner == busiest):
            for rank in range(ranks):
                if rank == busiest:
                    continue
                back: list[int | None] = [e for e, owner in enumerate(now) if owner == rank]
                if most is not None and counts[busiest] > 1 and counts[rank] < most:
                    back.append(None)
                for other in back:
                    moved = totals[expert] - (0 if other is None else totals[other])
                    # What the sum of squares of the loads falls by, over two.
                    gain = moved * (loads[busiest] - loads[rank] - moved)
                    found.append((gain, nodes[rank] == nodes[busiest], expert, other, rank))
        best = max((each[0] for each in found), default=0.0)
        if best <= (0.01 * mean) ** 2:  # a hundredth of a rank's rows is not worth an expert on the way
            return tuple(now)
        almost = [each for each in found if each[0] >= ALMOST * best]
        # Of equally good ones an exchange: it keeps the memory of ranks even.
        _, _, expert, other, rank = max(
            almost, key=lambda each: (each[1], each[0], each[3] is not None, -each[2], -each[4])
        )
        moved = totals[expert] - (0 if other is None else totals[other])
        loads[busiest] -= moved
        loads[rank] += moved
        now[expert] = rank
        if other is not None:
            now[other] = busiest
