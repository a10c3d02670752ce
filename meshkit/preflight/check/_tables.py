"""Table of all ranks' facts by parameter: replicas of a shard, and the mesh axes along which they differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshkit.mesh import MeshSpec
from meshkit.preflight.check._record import Facts, Region, Shard

RankShard = tuple[Facts, Shard]
TOLERANCES = {  # relative; wrong factors and missing sums are of the size of the values
    torch.float64: 1e-5,  # models compute some things in fp32 whatever their dtype
    torch.float32: 1e-3,
}
COARSE = 5e-2  # bf16 and fp16


class Table:
    """Facts of all ranks. compute: the dtype of matrix products, which decides the tolerance."""

    def __init__(self, facts: Sequence[Facts], spec: MeshSpec, compute: torch.dtype) -> None:
        self.facts, self.spec = list(facts), spec
        self.axes = [axis for axis, size in spec.sizes().items() if size > 1]
        self.names = list(
            dict.fromkeys(
                name for rank_facts in facts for name, shard in rank_facts.shards.items() if shard.value.numel()
            )
        )
        dtypes = {compute, *(shard.value.dtype for rank_facts in facts for shard in rank_facts.shards.values())}
        self.tolerance = max(TOLERANCES.get(dtype, COARSE) for dtype in dtypes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if axis in ("dp_replicate", "dp_shard", "cp"))

    def shards(self, name: str) -> list[RankShard]:
        """(facts, shard) of every rank that holds some of the parameter."""
        return [
            (facts, facts.shards[name])
            for facts in self.facts
            if name in facts.shards and facts.shards[name].value.numel()
        ]

    def differ_only_in(self, axis: str, first: Facts, second: Facts) -> bool:
        return first.coordinate[axis] != second.coordinate[axis] and all(
            first.coordinate[name] == second.coordinate[name] for name in self.axes if name != axis
        )


def same_region(shards: Sequence[RankShard]) -> list[list[RankShard]]:
    """The shards grouped by region: each group is the replicas of one shard."""
    groups: dict[Region, list[RankShard]] = {}
    for facts, shard in shards:
        groups.setdefault(shard.region, []).append((facts, shard))
    return list(groups.values())


def differing_axes(
    table: Table, replicas: Sequence[tuple[Facts, Tensor]], scale: float | None = None
) -> tuple[str, ...]:
    """Axes along which two ranks that differ in that axis alone hold different values of a replica. scale: see `close`."""
    return tuple(
        axis
        for axis in table.axes
        if any(
            not close(value, other_value, table.tolerance, scale)
            for index, (facts, value) in enumerate(replicas)
            for other_facts, other_value in replicas[index + 1 :]
            if table.differ_only_in(axis, facts, other_facts)
        )
    )


def max_difference(value: Tensor, expected: Tensor) -> float:
    """The largest absolute difference; infinite for other shapes and for NaN."""
    if value.shape != expected.shape:
        return float("inf")
    if not value.numel():
        return 0.0
    difference = float((value.double() - expected.double()).abs().max())
    return difference if difference == difference else float("inf")


def close(value: Tensor, expected: Tensor, bound: float, scale: float | None = None) -> bool:
    """Whether all differences are at most `bound` times the largest expected value, or `scale` where that is more."""
    if value.shape != expected.shape:
        return False
    size = max(float(expected.abs().max()) if expected.numel() else 0.0, scale or 0.0)
    return max_difference(value, expected) <= bound * size


def ratio(value: Tensor, expected: Tensor) -> float:
    """The factor f for which f * expected is closest to value (least squares)."""
    square = float(expected.double().square().sum())
    return float((value.double() * expected.double()).sum()) / square if square else float("nan")
