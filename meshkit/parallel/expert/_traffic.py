"""Communication volume of the expert all-to-all: the bytes `AllToAll` sends for a given routing, by arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from meshkit.core.sharding import chunk, even_part
from meshkit.parallel.expert._dispatch import DispatchPlan, experts_of
from meshkit.parallel.expert._placement import Placement
from meshkit.parallel.expert._stacks import ExpertLayout, packed_moves, packed_rows

Sizes = Counter[tuple[str, str, int]]
"""(axis, operation, bytes) -> how often. The axis is ep, etp or ep_etp."""


@dataclass(frozen=True)
class DispatchTraffic:
    """Messages of one rank for one call, counted as `explain` counts them."""

    counts: Sizes
    """the all-gather of token counts per expert, in forward only"""
    rows: Sizes
    """the two all-to-alls (and with etp the two collectives) of rows, once in forward and again in backward"""


def dispatch_traffic(plan: DispatchPlan, *, width: int, itemsize: int) -> DispatchTraffic:
    """width: features of a row; itemsize: bytes of one. Backward sends `rows` again, and recompute both."""
    ep, etp = plan.ranks
    remote = [
        sum(size for rank, size in enumerate(sizes) if rank != plan.coordinate[0])
        for sizes in (plan.sent(), plan.received())
    ]
    # Over etp padded to the rank with the most rows, as `all_gather_rows` pads.
    return _traffic(len(plan.counts[0][0]), ep, etp, remote, max(plan.gathered()), width * itemsize)


def padded_traffic(experts: int, *, ep: int, etp: int, max_rows: int, width: int, itemsize: int) -> DispatchTraffic:
    """What `PaddedAllToAll` sends, whatever tokens choose; width and itemsize as in `dispatch_traffic`."""
    return _traffic(experts, ep, etp, [(ep - 1) * max_rows] * 2, ep * max_rows, width * itemsize)


def _traffic(experts: int, ep: int, etp: int, remote: Sequence[int], longest: int, row: int) -> DispatchTraffic:
    """remote: rows to and from other ranks of ep. longest: rows after the all-to-all, of the rank with most. row: bytes."""
    counts, rows = Sizes(), Sizes()
    axes = "_".join(axis for axis, size in (("ep", ep), ("etp", etp)) if size > 1)
    if axes:
        # Counts are int64: 8 bytes for each expert of each rank.
        counts[axes, "all_gather", ep * etp * experts * 8] += 1
    if ep > 1:
        for sent in remote:
            rows["ep", "all_to_all", sent * row] += 1
    if etp > 1:
        rows["etp", "all_gather", longest * etp * row] += 1
        rows["etp", "reduce_scatter", longest * etp * row] += 1
    return DispatchTraffic(counts, _without_empty(rows))


def packed_traffic(
    layout: ExpertLayout,
    shapes: Mapping[str, Sequence[int]],
    *,
    ep: int,
    etp: int,
    coordinate: tuple[int, int],
    itemsize: int,
) -> list[tuple[int, int]]:
    """(bytes sent in forward, bytes sent in backward) of each parameter with gate and up whose rows travel over etp.

    shapes: of the full parameters. See [Note: gate and up in one parameter].
    """
    i, j = coordinate
    found = []
    for key, packed in layout.packed.items():
        rows = shapes[key][layout.dims[key]]
        moves = packed_moves(rows, packed, etp)
        if any(to for source, others in enumerate(moves) for rank, to in enumerate(others) if rank != source):
            size = prod(shapes[key]) // (layout.experts * rows) * len(experts_of(layout.experts, ep, i)) * itemsize
            sent = sum(len(to) for rank, to in enumerate(moves[j]) if rank != j)
            received = sum(len(source[j]) for rank, source in enumerate(moves) if rank != j)
            found.append((sent * size, received * size))
    return found


def copy_bytes(
    layout: ExpertLayout, shapes: Mapping[str, Sequence[int]], *, etp: int, coordinate: tuple[int, int], itemsize: int
) -> int:
    """Bytes of one expert as a rank of etp computes with it, and sends it over ep. shapes: of full parameters."""
    j, elements = coordinate[1], 0
    for key, (_, *shape) in shapes.items():
        dim = layout.dims[key] - 1
        if etp > 1 and key in layout.packed:
            shape[dim] = len(packed_rows(shape[dim], layout.packed[key], etp, j))
        elif etp > 1 and key not in layout.biases:  # a bias of outputs has zeros for those of other ranks
            part = chunk(shape[dim], etp, j)
            shape[dim] = part.stop - part.start
        elements += prod(shape)
    return elements * itemsize


def copy_traffic(placement: Placement, rank: int, expert_bytes: int) -> tuple[int, int]:
    """(bytes that a rank of ep sends of copies, bytes of their gradients): of each gather, and of the way back."""
    return sum(map(len, placement.sent(rank))) * expert_bytes, len(placement.copied[rank]) * expert_bytes


def _without_empty(sizes: Sizes) -> Sizes:
    return Counter({key: times for key, times in sizes.items() if key[2]})


def even_routing(
    experts: int,
    pairs: int,
    *,
    ep: int,
    etp: int,
    coordinate: tuple[int, int],
    placement: Placement | None = None,
    nodes: tuple[int, ...] | None = None,
) -> DispatchPlan:
    """The plan if every rank's `pairs` (token, choice) pairs were spread evenly over all experts."""
    counts = [len(even_part(pairs, experts, expert)) for expert in range(experts)]
    return DispatchPlan([[counts for _ in range(etp)] for _ in range(ep)], coordinate, placement, nodes)
