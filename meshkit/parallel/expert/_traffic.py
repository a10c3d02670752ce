"""What `AllToAll` sends for a given routing, by arithmetic."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshkit.core.sharding import even_part
from meshkit.parallel.expert._dispatch import Sent

Sizes = Counter[tuple[str, str, int]]
"""(axis, operation, bytes) -> how often. The axis is ep, etp or ep_etp."""


@dataclass(frozen=True)
class DispatchTraffic:
    """What one rank sends for one call, counted as `explain` counts."""

    counts: Sizes
    """of tokens per expert, once"""
    rows: Sizes
    """there and back, in each direction"""


def dispatch_traffic(plan: Sent, *, width: int, itemsize: int) -> DispatchTraffic:
    """width: features of a row; itemsize: bytes of one. Backward sends `rows` again, and recompute both."""
    ep, etp = plan.ranks
    counts, rows = Sizes(), Sizes()
    experts = len(plan.counts[0][0])
    both = "_".join(axis for axis, size in (("ep", ep), ("etp", etp)) if size > 1)
    if both:
        counts[both, "all_gather", ep * etp * experts * 8] += 1
    if ep > 1:
        for sizes in (plan.sent(), plan.received()):
            away = sum(size for rank, size in enumerate(sizes) if rank != plan.place[0])
            rows["ep", "all_to_all", away * width * itemsize] += 1
    if etp > 1:
        longest = max(plan.gathered()) * etp * width * itemsize
        rows["etp", "all_gather", longest] += 1
        rows["etp", "reduce_scatter", longest] += 1
    return DispatchTraffic(counts, _sent(rows))


def _sent(sizes: Sizes) -> Sizes:
    return Counter({key: times for key, times in sizes.items() if key[2]})


def even_routing(experts: int, pairs: int, *, ep: int, etp: int, place: tuple[int, int]) -> Sent:
    """As if every rank's `pairs` (token, choice) pairs went to all experts alike."""
    own = [len(even_part(pairs, experts, expert)) for expert in range(experts)]
    return Sent([[own for _ in range(etp)] for _ in range(ep)], place)
