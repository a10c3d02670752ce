"""Seconds of a collective on a group of ranks (alpha-beta; ring, tree, all-to-all) by the tiers it crosses, or as measured.

| collective                  | bytes through the slowest link of a rank | hops                     |
|-----------------------------|------------------------------------------|--------------------------|
| all_gather, reduce_scatter  | (n - 1) / n of the whole                 | ring: n - 1              |
| all_reduce                  | twice that                               | 2 (n - 1), tree 2 log2 n |
| all_to_all                  | what leaves the rank, by tier            | n - 1                    |
| send                        | all                                      | 1                        |

n ranks; a hop between nodes costs the outer tier's latency, one inside of a node the inner's. A ring that leaves a block of
the tier below does so over the links of all its ranks there, and those of sibling groups go over other links: a block's
uplink is shared by its ranks evenly. Source: Thakur et al. 2005, section 4; Patarasuk and Yuan 2009 (two-level rings).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, log2

from meshkit.cluster._cluster import OPS, Cluster, Measured
from meshkit.cluster._place import Place, place_of_pairs, place_of_stages
from meshkit.cluster._unlike import Link
from meshkit.errors import ClusterError
from meshkit.mesh import MeshSpec

MUTUAL = ("all_to_all", "broadcast")  # between any two ranks of a group; the others go around a ring


def collective_s(cluster: Cluster, op: str, size: float, place: Place) -> float:
    """Seconds of one call. size: bytes as `explain` counts them: an all-gather's result, a reduce-scatter's input, and of a
    send or an all-to-all what leaves the rank. A measured curve of that op on that tier wins.

    Raises: ClusterError for an op that is not known.
    """
    if op not in (*OPS, "broadcast"):
        raise ClusterError(f"collective {op!r} has no price. The ops are {', '.join(OPS)}.")
    if place.ranks == 1 or size <= 0:
        return 0.0
    if (link := place.mutual if op in MUTUAL else place.ring) is not None:
        return _modelled_s(*_over(cluster, place, link), op, size)
    curve = _curve(cluster, op, place)
    if curve is None:
        return _modelled_s(cluster, place, op, size)
    seconds = _interpolated(curve.points, size)
    if curve.ranks == place.ranks:
        return seconds
    # Of other numbers of ranks the nearest curve is taken, and scaled as the model is. Its ranks were next to one another.
    there = Place(curve.ranks, tuple(min(tier.ranks, curve.ranks) for tier in cluster.tiers))
    return seconds * _modelled_s(cluster, place, op, size) / _modelled_s(cluster, there, op, size)


def hierarchical_s(
    cluster: Cluster, op: str, size: float, *, inside: Place, across: Place, chunk_bytes: float
) -> float:
    """Seconds of one all-gather or reduce-scatter in two hops: a pipeline of chunks, as slow as the slower of its hops.

    size: as the flat one's. inside, across: places of the groups of both hops. chunk_bytes: of a rank's part. A chunk that is
    put in order is read and written once more, which is counted with the hop inside.
    """
    ranks = inside.ranks * across.ranks
    if ranks == 1 or size <= 0:
        return 0.0
    count = ceil(size / ranks / chunk_bytes)
    across_s = collective_s(cluster, op, size / inside.ranks / count, across)
    copied_s = 2 * size / count / (cluster.device.memory_bytes_per_s * cluster.device.efficiency.memory)
    inside_s = collective_s(cluster, op, size / count, inside) + copied_s
    return across_s + inside_s + (count - 1) * max(across_s, inside_s)


def hop_s(cluster: Cluster, size: float, one: int, other: int) -> float:
    """Seconds of a message from one rank of the cluster to another, while all others of its node send too."""
    return collective_s(cluster, "send", size, place_of_pairs(cluster, [(one, other)]))


def stage_hop_s(cluster: Cluster, spec: MeshSpec, size: float, one: int, other: int) -> float:
    """Seconds of the messages from one rank of pp to another, which all its ranks send at once."""
    return collective_s(cluster, "send", size, place_of_stages(cluster, spec, one, other))


def ring_bytes_per_s(cluster: Cluster, place: Place) -> float:
    """What a ring through the group carries, all groups of its axis at the same time."""
    tiers = cluster.tiers
    rates = [tiers[0].carried_bytes_per_s] if place.inside[0] > 1 else []
    rates += [_uplink_share(cluster, place, tier) for tier in range(1, place.outermost + 1)]
    return min(rates, default=tiers[0].carried_bytes_per_s)


def _uplink_share(cluster: Cluster, place: Place, tier: int) -> float:
    """The group's part of what leaves one block of the tier below: that of its ranks there."""
    outer, block = cluster.tiers[tier], cluster.tiers[tier - 1].ranks
    uplink = outer.carried_bytes_per_s * (1 if outer.per == "group" else block)
    return uplink * place.inside[tier - 1] / block


def _hops_s(cluster: Cluster, place: Place) -> tuple[float, float]:
    """Latency of all hops of (a ring, a tree) through the group."""
    ring = tree = 0.0
    below = 1
    for tier, count in zip(cluster.tiers, place.inside[: place.outermost + 1], strict=False):
        blocks = -(-count // below)  # of the tier below, that one of this tier joins
        ring += (blocks - 1) * tier.latency_s
        tree += log2(blocks) * tier.latency_s
        below = count
    return ring, tree


def _over(cluster: Cluster, place: Place, link: Link) -> tuple[Cluster, Place]:
    """The tiers inside of a block, and around them one of the link that is waited for; the place on these."""
    assert cluster.unlike is not None
    inner = [tier for tier in cluster.tiers if tier.ranks <= cluster.unlike.each and cluster.unlike.each > 1]
    outer = replace(
        cluster.tiers[len(inner)],
        ranks=cluster.ranks,
        bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
        oversubscribed=1.0,
    )
    return (
        replace(cluster, tiers=(*inner, outer), collectives=(), unlike=None),
        Place(place.ranks, (*place.inside[: len(inner)], place.ranks)),
    )


def _modelled_s(cluster: Cluster, place: Place, op: str, size: float) -> float:
    n = place.ranks
    ring_s, tree_s = _hops_s(cluster, place)
    if op == "all_to_all":
        return _all_to_all_s(cluster, size, place)
    rate = ring_bytes_per_s(cluster, place)
    if op == "send":
        return cluster.tiers[place.outermost].latency_s + size / rate
    if op == "broadcast":
        return tree_s + size / rate
    share = (n - 1) / n * size / rate
    if op == "all_reduce":
        # A tree sends everything up and down once; its hops are few, so it wins for small messages.
        return min(2 * ring_s + 2 * share, 2 * tree_s + 2 * size / rate)
    return ring_s + share


def _all_to_all_s(cluster: Cluster, size: float, place: Place) -> float:
    """Each tier carries the part for ranks that no tier below it reaches; tiers send at the same time.

    Without a spine, what goes to another place of another node is first sent to the rank of that place in this one, over the
    tier below, and then leaves (Wang et al. 2023, rail-only networks, who state 8.2 to 11.2 % for nodes of 8 and more).
    """
    slowest, hops_s, forward_s, below = 0.0, 0.0, 0.0, 1
    tiers = cluster.tiers[: place.outermost + 1]
    for index, tier in enumerate(tiers):
        others = place.inside[index] - below
        below = place.inside[index]
        rate = tier.carried_bytes_per_s
        if index:  # a rank's own part of the uplink
            rate = _uplink_share(cluster, place, index) / place.inside[index - 1]
        if index and tier.per == "rail" and others and (inside := place.inside[index - 1]) > 1:
            inner, elsewhere = tiers[index - 1], (inside - 1) / inside
            forward_s += inner.latency_s + size * others / (place.ranks - 1) * elsewhere / inner.carried_bytes_per_s
        slowest = max(slowest, size * others / (place.ranks - 1) / rate)
        hops_s = max(hops_s, tier.latency_s * log2(others + 1)) if others else hops_s
    return hops_s + forward_s + slowest


def _curve(cluster: Cluster, op: str, place: Place) -> Measured | None:
    tier = cluster.tiers[place.outermost].name
    curves = [curve for curve in cluster.collectives if (curve.op, curve.tier) == (op, tier)]
    return min(curves, key=lambda curve: abs(log2(curve.ranks / place.ranks)), default=None)


def _interpolated(points: Sequence[tuple[float, float]], size: float) -> float:
    """Linear between the points. Below the first nothing gets cheaper, beyond the last the last bandwidth holds."""
    if size <= points[0][0]:
        return points[0][1]
    at = bisect_left(points, (size, 0.0))
    if at == len(points):
        return points[-1][1] * size / points[-1][0]
    (size_0, seconds_0), (size_1, seconds_1) = points[at - 1], points[at]
    return seconds_0 + (seconds_1 - seconds_0) * (size - size_0) / (size_1 - size_0)
