"""Seconds of collectives: closed forms by hand, bounds, and measured curves that win."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.cluster import Cluster, Device, Measured, Place, Tier, collective_s, hop_s, place_of
from meshkit.errors import ClusterError
from meshkit.mesh import MeshSpec

DEVICE = Device(name="d", memory_bytes=1e9, memory_bytes_per_s=1e9, flops_per_s={"float32": 1e9})
# A node of 8 with links of 100 GB/s, and a NIC of 10 GB/s each.
NODES = Cluster(
    name="c",
    device=DEVICE,
    tiers=(
        Tier(name="node", ranks=8, bytes_per_s=100e9, latency_s=1e-6),
        Tier(name="rail", ranks=64, bytes_per_s=10e9, latency_s=1e-5),
    ),
)
ONE_NIC = Cluster(
    name="c",
    device=DEVICE,
    tiers=(NODES.tiers[0], Tier(name="rail", ranks=64, bytes_per_s=10e9, latency_s=1e-5, per="group")),
)
GB = 1e9


def test_an_axis_lies_where_its_stride_and_extent_put_it() -> None:
    spec = MeshSpec.parse("pp=2 dp_shard=8 tp=4")
    assert place_of(NODES, spec, "tp") == Place(4, (4, 4))
    assert place_of(NODES, spec, "dp_shard") == Place(8, (2, 8))
    assert place_of(NODES, spec, "pp") == Place(2, (1, 2))
    assert place_of(NODES, MeshSpec.parse("dp_shard=16 tp=2 ep=8"), "ep") == Place(8, (8, 8))
    assert place_of(NODES, MeshSpec.parse("dp_replicate=2 dp_shard=2 cp=4"), "dp_shard_cp") == Place(8, (8, 8))


@given(st.sampled_from(["pp=2 dp_shard=4 cp=2 tp=4", "dp_replicate=4 dp_shard=2 tp=8", "dp_shard=16 tp=4 ep=8 etp=2"]))
def test_places_count_the_groups_of_the_mesh(mesh: str) -> None:
    spec = MeshSpec.parse(mesh)
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "edp", "ep", "etp"):
        group = spec.groups(axis)[0]
        counts = [sum(rank // 8 == group[0] // 8 for rank in group), len(group)]
        assert place_of(NODES, spec, axis) == Place(len(group), tuple(counts))


def test_a_mesh_that_the_cluster_does_not_hold_is_refused() -> None:
    with pytest.raises(ClusterError, match="the mesh has 128 ranks, but cluster 'c' holds 64"):
        place_of(NODES, MeshSpec.parse("dp_shard=128"), "dp_shard")


def test_a_ring_inside_of_a_node() -> None:
    seconds = collective_s(NODES, "all_gather", GB, Place(4, (4, 4)))
    assert seconds == pytest.approx(3 * 1e-6 + 3 / 4 * GB / 100e9)
    assert collective_s(NODES, "reduce_scatter", GB, Place(4, (4, 4))) == seconds


def test_a_ring_over_nodes_goes_over_the_nics_of_its_ranks_there() -> None:
    # 2 of 8 ranks of a node: 2 NICs; one hop in each node and three between four nodes.
    assert collective_s(NODES, "all_gather", GB, Place(8, (2, 8))) == pytest.approx(3e-5 + 1e-6 + 7 / 8 * GB / 20e9)
    # All 8: 80 GB/s, still less than the links inside.
    assert collective_s(NODES, "all_gather", GB, Place(16, (8, 16))) == pytest.approx(1e-5 + 7e-6 + 15 / 16 * GB / 80e9)


def test_sibling_groups_share_the_one_nic_of_a_node() -> None:
    assert collective_s(ONE_NIC, "all_gather", GB, Place(8, (2, 8))) == pytest.approx(3e-5 + 1e-6 + 7 / 8 * GB / 2.5e9)


def test_an_all_reduce_is_a_ring_if_large_and_a_tree_if_small() -> None:
    place = Place(8, (8, 8))
    assert collective_s(NODES, "all_reduce", GB, place) == pytest.approx(2 * (7e-6 + 7 / 8 * GB / 100e9))
    assert collective_s(NODES, "all_reduce", 8, place) == pytest.approx(2 * (log2(8) * 1e-6 + 8 / 100e9))


def test_an_all_to_all_sends_to_each_tier_its_part() -> None:
    # 12 of 15 others are in other nodes, over a NIC of its own.
    expected = 12 / 15 * GB / 10e9 + 1e-5 * log2(13)
    assert collective_s(NODES, "all_to_all", GB, Place(16, (4, 16))) == pytest.approx(expected)


def test_without_a_spine_an_all_to_all_is_forwarded_inside_of_the_node() -> None:
    rails = replace(NODES, tiers=(NODES.tiers[0], replace(NODES.tiers[1], per="rail")))
    place = Place(16, (8, 16))
    spine_s = collective_s(NODES, "all_to_all", GB, place)
    assert spine_s == pytest.approx(log2(9) * 1e-5 + GB * 8 / 15 / 10e9)
    # Seven eighths of what leaves go to another place, over NVLink first.
    assert collective_s(rails, "all_to_all", GB, place) == pytest.approx(1e-6 + 8 / 15 * 7 / 8 * GB / 100e9 + spine_s)
    h100 = Cluster.read("h100")
    without = replace(h100, tiers=(h100.tiers[0], replace(h100.tiers[1], per="rail")))
    far = Place(128, (8, 128))
    more = collective_s(without, "all_to_all", GB, far) / collective_s(h100, "all_to_all", GB, far) - 1
    assert 0.08 < more < 0.115  # the published range
    # Rings, and groups of one rank in each node, send on their rails anyway.
    for op in ("all_gather", "all_reduce", "send"):
        assert collective_s(rails, op, GB, place) == collective_s(NODES, op, GB, place)
    assert collective_s(rails, "all_to_all", GB, Place(2, (1, 2))) == collective_s(
        NODES, "all_to_all", GB, Place(2, (1, 2))
    )


def test_a_hop_between_nodes() -> None:
    assert hop_s(NODES, GB, 0, 8) == pytest.approx(1e-5 + GB / 10e9)
    assert hop_s(NODES, GB, 0, 1) == pytest.approx(1e-6 + GB / 100e9)


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]),
    st.floats(1, 1e11),
    st.sampled_from([Place(2, (1, 2)), Place(2, (2, 2)), Place(8, (8, 8)), Place(32, (4, 32)), Place(64, (8, 64))]),
)
def test_more_bytes_take_longer_and_never_less_than_the_link(op: str, size: float, place: Place) -> None:
    seconds = collective_s(NODES, op, size, place)
    assert seconds < collective_s(NODES, op, 2 * size, place) <= 2 * seconds
    fastest = 100e9 * 1.0001
    assert seconds * fastest >= (1 if op == "send" else (place.ranks - 1) / place.ranks) * size * (op != "all_to_all")


def test_one_rank_sends_nothing() -> None:
    assert collective_s(NODES, "all_reduce", GB, Place(1, (1, 1))) == 0


def test_a_measured_curve_wins_and_is_linear_between_its_points() -> None:
    from dataclasses import replace

    curve = Measured(op="all_reduce", tier="node", ranks=4, points=((1e3, 1e-4), (1e6, 1e-3), (1e9, 0.5)))
    cluster = replace(NODES, collectives=(curve,))
    place = Place(4, (4, 4))
    assert collective_s(cluster, "all_reduce", 10, place) == 1e-4
    assert collective_s(cluster, "all_reduce", 1e6, place) == 1e-3
    assert collective_s(cluster, "all_reduce", (1e3 + 1e6) / 2, place) == pytest.approx((1e-4 + 1e-3) / 2)
    assert collective_s(cluster, "all_reduce", 4e9, place) == pytest.approx(2.0)
    assert collective_s(cluster, "all_gather", 1e6, place) == collective_s(NODES, "all_gather", 1e6, place)
    # Of other ranks it is scaled as the model is.
    large = collective_s(cluster, "all_reduce", 1e9, Place(8, (8, 8)))
    assert large == pytest.approx(0.5 * (7 / 8) / (3 / 4), rel=1e-3)


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(ClusterError, match="collective 'gossip' has no price"):
        collective_s(NODES, "gossip", 1, Place(2, (2, 2)))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
def test_a_measured_curve_is_scaled_to_other_numbers_of_ranks(ranks: int) -> None:
    """As the model is, which is the curve here; of fewer ranks, of more, and of ranks in other nodes."""
    place = place_of(NODES, MeshSpec(dp_shard=ranks), "dp_shard")
    tier, measured_on = ("node", 4) if ranks <= 8 else ("rail", 32)
    there = place_of(NODES, MeshSpec(dp_shard=measured_on), "dp_shard")
    curve = Measured(
        op="all_gather", tier=tier, ranks=measured_on, points=((GB, collective_s(NODES, "all_gather", GB, there)),)
    )
    measured = replace(NODES, collectives=(curve,))
    assert collective_s(measured, "all_gather", GB, place) == pytest.approx(
        collective_s(NODES, "all_gather", GB, place)
    )
