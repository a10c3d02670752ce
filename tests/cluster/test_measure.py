"""measure-cluster: what ranks measure of themselves is a cluster, in a file, on which a step has a price."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshkit.cluster import Cluster, Op, kernel_s, measure
from meshkit.cluster._cluster import OPS
from tests.world import pool


def measured(path: str) -> None:
    with mock.patch.multiple(
        measure, LEAST_S=5e-4, REPEATS=1, ELEMENTS={"cpu": (1 << 10, 1 << 12)}, MESSAGES=(1 << 8, 1 << 14)
    ):
        group = dist.group.WORLD if dist.get_world_size() > 1 else None
        found = measure.measure(torch.device("cpu"), group=group)
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
