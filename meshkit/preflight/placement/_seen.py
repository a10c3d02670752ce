"""What the price of a step depends on where ranks are unlike: the slowest device of each rank of pp, the slowest links."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from meshkit.cluster import MUTUAL, Unlike, groups_of, ranks_of_stage
from meshkit.mesh import MeshSpec
from meshkit.preflight.forecast import StepProfile
from meshkit.preflight.placement._orders import Orderings, Seen


def seen_of(profile: StepProfile, unlike: Unlike) -> Callable[[Orderings], Seen]:
    """Of each order: a speed for each rank of pp, bytes/s and latency for each of its axes' messages, and for each way
    between ranks of pp. Orders with equal rows have steps of equal seconds.
    """
    spec, each = profile.spec, unlike.each
    stages = [np.unique(np.arange(*ranks_of_stage(spec, stage)) // each) for stage in range(spec.pp)]
    links = [blocks for pairs in _messages(profile) if len(blocks := _of_blocks(pairs, each))]
    speed = np.array(unlike.speed)
    rate, latency = np.array(unlike.bytes_per_s), np.array(unlike.latency_s)

    def seen(orders: Orderings) -> Seen:
        columns = [speed[orders[:, stage]].min(axis=1) for stage in stages] if unlike.speed else []
        for blocks in links if unlike.bytes_per_s else []:
            here, there = orders[:, blocks[:, 0]], orders[:, blocks[:, 1]]
            columns += [rate[here, there].min(axis=1), latency[here, there].max(axis=1)]
        return np.stack(columns, axis=1) if columns else np.zeros((len(orders), 1))

    return seen


def _messages(profile: StepProfile) -> Iterable[set[tuple[int, int]]]:
    """Pairs of ranks of the mesh of which the slowest is waited for, together."""
    spec = profile.spec
    calls = {
        (axis, call.op in MUTUAL)
        for stage in profile.stages
        for part in stage
        for call in (*part.calls, *part.data)
        for axis in (call.axis, *(() if call.hierarchical is None else (call.hierarchical.inside,)))
    }
    for axis, mutual in sorted(calls):
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
