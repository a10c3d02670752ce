"""measure-cluster: what ranks measure of themselves is a cluster, in a file, on which a step has a price."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshkit.cluster import Cluster, Op, _bench, _measure_unlike, kernel_s, measure
from meshkit.cluster._cluster import OPS
from tests.world import pool


def measured(path: str, per_node: int | None = None, unlike: bool = False) -> None:
    with (
        mock.patch.multiple(measure, ELEMENTS={"cpu": (1 << 10, 1 << 12)}, MESSAGES=(1 << 8, 1 << 14), PRODUCTS=1),
        mock.patch.multiple(_bench, LEAST_S=5e-4, REPEATS=1),
        mock.patch.multiple(_measure_unlike, MOST=1 << 18, TURNS=2, ROUND_S=0.02),
    ):
        group = dist.group.WORLD if dist.get_world_size() > 1 else None
        found = measure.measure(torch.device("cpu"), group=group, ranks_per_node=per_node, unlike=unlike)
    if dist.get_rank() == 0:
        found.write(path)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_measure_themselves(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "cluster.toml"
    pool(ranks).run(measured, str(path))
    cluster = Cluster.read(path)
    assert cluster.level == "measured"
    assert 0 < cluster.host.cores <= ranks
    assert cluster.crowding >= 1
    assert {curve.op for curve in cluster.collectives} == (set(OPS) if ranks > 1 else set())
    sizes = {curve.ranks for curve in cluster.collectives if curve.op == "all_gather"}
    assert sizes == {size for size in (2, 4) if size <= ranks}  # groups of an axis, too
    for curve in cluster.collectives:
        seconds = [seconds for _, seconds in curve.points]
        assert seconds == sorted(seconds)
    assert [size for size, _ in cluster.device.memory_curve] == [2 * 4 * (1 << 10), 2 * 4 * (1 << 12)]
    small = Op("matmul", "float32", 2.0 * 64**3, 2.0 * 64**3, 64, 64, 64, 1, 3 * 4 * 64**2, "forward")
    assert 0 < kernel_s(cluster.device, small) < 1


@pytest.mark.parametrize(("ranks", "per_node", "blocks"), [(4, None, 4), (4, 2, 2), (1, None, 0)])
def test_ranks_measure_how_unlike_they_are(tmp_path: Path, ranks: int, per_node: int | None, blocks: int) -> None:
    path = tmp_path / "cluster.toml"
    pool(ranks).run(measured, str(path), per_node, True)
    cluster = Cluster.read(path)
    assert cluster.collectives == ()
    if not blocks:
        assert cluster.unlike is None
        return
    found = cluster.unlike
    assert (found.blocks, found.each) == (blocks, ranks // blocks)
    assert max(found.speed) == 1
    assert cluster.ranks == ranks
    rates = [found.bytes_per_s[i][j] for i in range(blocks) for j in range(blocks) if i != j]
    assert cluster.tiers[-1].bytes_per_s == max(rates) > min(rates) / 10 > 0
    assert [tier.ranks for tier in cluster.tiers] == ([2, 4] if per_node else [4])


def test_what_falls_is_pooled() -> None:
    assert measure._never_falling([1.0, 3.0, 2.0, 5.0]) == [1.0, 2.5, 2.5, 5.0]
    assert measure._never_falling([3.0, 2.0, 1.0]) == [2.0] * 3
    assert measure._never_falling([1.0, 2.0]) == [1.0, 2.0]
