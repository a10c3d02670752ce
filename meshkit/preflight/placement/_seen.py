"""What the price of a step depends on where ranks are unlike: the least device of each rank of pp, the slowest links."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from meshkit.cluster import MUTUAL, Cluster, groups_of, memory_of, place_of, place_of_stages, ranks_of_stage, speed_of
from meshkit.mesh import MeshSpec
from meshkit.preflight.forecast import StepProfile
from meshkit.preflight.placement._orders import Order, Orderings, Seen


def seen_of(
    profile: StepProfile, cluster: Cluster, ranks: Callable[[Order], tuple[int, ...]]
) -> Callable[[Orderings], Seen]:
    """Of each order: a speed and a memory for each rank of pp, bytes/s and latency for each of its axes' messages, and for
    each way between ranks of pp. Orders with equal rows have steps of equal seconds, or none of them fits. ranks: the
    placement that an order is.
    """
    unlike = cluster.unlike
    assert unlike is not None
    if not unlike.bytes_per_s and sum(tier.ranks > unlike.each for tier in cluster.tiers) > 1:
        return _by_tiers(profile, cluster, ranks)
    spec, each = profile.spec, unlike.each
    stages = [np.unique(np.arange(*ranks_of_stage(spec, stage)) // each) for stage in range(spec.pp)]
    links = [blocks for pairs in _messages(profile) if len(blocks := _of_blocks(pairs, each))]
    devices = [np.array(each) for each in (unlike.speed, unlike.memory_bytes) if each]
    rate, latency = np.array(unlike.bytes_per_s), np.array(unlike.latency_s)

    def seen(orders: Orderings) -> Seen:
        columns = [of_blocks[orders[:, stage]].min(axis=1) for of_blocks in devices for stage in stages]
        for blocks in links if unlike.bytes_per_s else []:
            here, there = orders[:, blocks[:, 0]], orders[:, blocks[:, 1]]
            columns += [rate[here, there].min(axis=1), latency[here, there].max(axis=1)]
        return np.stack(columns, axis=1) if columns else np.zeros((len(orders), 1))

    return seen


def _by_tiers(
    profile: StepProfile, cluster: Cluster, ranks: Callable[[Order], tuple[int, ...]]
) -> Callable[[Orderings], Seen]:
    """The same where several tiers, and no table, say what a message crosses: by its place, order by order."""
    known: dict[object, int] = {}
    stages = range(profile.spec.pp)
    axes = sorted({axis for axis, _ in _calls(profile)})
    ways = () if profile.schedule is None else sorted(profile.schedule.ways)

    def of(order: Order) -> list[int]:
        spec = replace(profile.spec, placement=ranks(order))
        seen: list[object] = [each(cluster, spec, stage) for each in (speed_of, memory_of) for stage in stages]
        seen += [place_of(cluster, spec, axis, stage=stage) for axis in axes for stage in stages]
        seen += [place_of(cluster, spec, axis) for axis in sorted({call.axis for call in profile.once})]
        seen += [place_of_stages(cluster, spec, *way) for way in ways]
        return [known.setdefault(each, len(known)) for each in seen]

    return lambda orders: np.array([of(tuple(order)) for order in orders.tolist()])


def _calls(profile: StepProfile) -> set[tuple[str, bool]]:
    """Axes of what a stage sends, and whether any two ranks of one do."""
    return {
        (axis, call.op in MUTUAL)
        for stage in profile.stages
        for part in stage
        for call in (*part.calls, *part.data)
        for axis in (call.axis, *(() if call.hierarchical is None else (call.hierarchical.inside,)))
    }


def _messages(profile: StepProfile) -> Iterable[set[tuple[int, int]]]:
    """Pairs of ranks of the mesh of which the slowest is waited for, together."""
    spec = profile.spec
    for axis, mutual in sorted(_calls(profile)):
        for stage in range(spec.pp):
            yield _pairs(spec, axis, mutual, range(*ranks_of_stage(spec, stage)))
    for axis, mutual in sorted({(call.axis, call.op in MUTUAL) for call in profile.once}):
        yield _pairs(spec, axis, mutual, range(spec.world_size))
    for one, other in () if profile.schedule is None else sorted(profile.schedule.ways):
        yield set(zip(range(*ranks_of_stage(spec, one)), range(*ranks_of_stage(spec, other)), strict=True))


def _pairs(spec: MeshSpec, axis: str, mutual: bool, ranks: range) -> set[tuple[int, int]]:
    groups = [group for group in groups_of(spec, axis) if group[0] in ranks]
    if mutual:
        return {(one, other) for group in groups for one in group for other in group}
    return {pair for group in groups for pair in zip(group, [*group[1:], group[0]], strict=True)}


def _of_blocks(pairs: Iterable[tuple[int, int]], each: int) -> np.ndarray:
    """Pairs of places of blocks that are not one."""
    return np.array(sorted({(one // each, other // each) for one, other in pairs if one // each != other // each}))
