"""Unlike blocks of a cluster: closed forms of messages over their links, and what no machine could be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshkit.cluster import Cluster, Device, Place, Tier, Unlike, collective_s, hop_s, memory_of, place_of, speed_of
from meshkit.cluster import stage_hop_s as between_stages
from meshkit.errors import ClusterError
from meshkit.mesh import MeshSpec

DEVICE = Device(name="d", memory_bytes=1e9, memory_bytes_per_s=1e9, flops_per_s={"float32": 1e9})
FAST, SLOW, NEAR, FAR = 1e9, 1e8, 1e-5, 1e-3
# Ranks 0 and 1 are far from each other, and so are 2 and 3; all other links are fast.
RATES = ((0, SLOW, FAST, FAST), (SLOW, 0, FAST, FAST), (FAST, FAST, 0, SLOW), (FAST, FAST, SLOW, 0))
LATENCIES = ((0, FAR, NEAR, NEAR), (FAR, 0, NEAR, NEAR), (NEAR, NEAR, 0, FAR), (NEAR, NEAR, FAR, 0))
FOUR = Cluster(
    name="four",
    device=DEVICE,
    tiers=(Tier(name="all", ranks=4, bytes_per_s=FAST, latency_s=NEAR),),
    unlike=Unlike(speed=(1, 1, 1, 0.5), bytes_per_s=RATES, latency_s=LATENCIES),
)
# Two ranks in each of three nodes, which share the node's card; node 2 is behind a slow link.
NODES = Cluster(
    name="nodes",
    device=DEVICE,
    tiers=(
        Tier(name="node", ranks=2, bytes_per_s=1e10, latency_s=1e-6),
        Tier(name="rail", ranks=6, bytes_per_s=FAST, latency_s=NEAR, per="group"),
    ),
    unlike=Unlike(
        each=2,
        bytes_per_s=((0, FAST, SLOW), (FAST, 0, SLOW), (SLOW, SLOW, 0)),
        latency_s=((0, NEAR, FAR), (NEAR, 0, FAR), (FAR, FAR, 0)),
    ),
)
MB = 1e6


def seconds(cluster: Cluster, mesh: str, axis: str, op: str, stage: int | None = None) -> float:
    return collective_s(cluster, op, MB, place_of(cluster, MeshSpec.parse(mesh), axis, stage=stage))


def test_the_slowest_link_of_a_ring_is_waited_for() -> None:
    assert seconds(FOUR, "dp_shard=2 tp=2", "tp", "all_gather") == pytest.approx(FAR + MB / 2 / SLOW)
    assert seconds(FOUR, "dp_shard=2 tp=2", "dp_shard", "all_gather") == pytest.approx(NEAR + MB / 2 / FAST)
    assert seconds(FOUR, "tp=4", "tp", "all_gather") == pytest.approx(3 * FAR + 3 * MB / 4 / SLOW)


def test_a_placement_puts_neighbours_on_other_links() -> None:
    assert seconds(FOUR, "dp_shard=2 tp=2 placement=0-2-1-3", "tp", "all_gather") == pytest.approx(NEAR + MB / 2 / FAST)
    assert seconds(FOUR, "dp_shard=2 tp=2 placement=0-2-1-3", "dp_shard", "all_gather") == pytest.approx(
        FAR + MB / 2 / SLOW
    )
    # The ring 0, 2, 1, 3 crosses no slow link, but any two of it do.
    assert seconds(FOUR, "tp=4 placement=0-2-1-3", "tp", "all_gather") == pytest.approx(3 * NEAR + 3 * MB / 4 / FAST)
    assert seconds(FOUR, "tp=4 placement=0-2-1-3", "tp", "all_to_all") == pytest.approx(2 * FAR + MB / SLOW)


def test_each_rank_of_pp_has_links_and_a_speed_of_its_own() -> None:
    one = replace(
        FOUR, unlike=Unlike(speed=(1, 1, 1, 0.5), bytes_per_s=((0, FAST, FAST, FAST), *RATES[1:]), latency_s=LATENCIES)
    )
    fast = replace(
        one, unlike=replace(one.unlike, bytes_per_s=(one.unlike.bytes_per_s[0], (FAST, 0, FAST, FAST), *RATES[2:]))
    )
    assert seconds(fast, "pp=2 tp=2", "tp", "all_gather", 0) == pytest.approx(FAR + MB / 2 / FAST)
    assert seconds(fast, "pp=2 tp=2", "tp", "all_gather", 1) == pytest.approx(FAR + MB / 2 / SLOW)
    assert [speed_of(FOUR, MeshSpec.parse("pp=2 tp=2"), stage) for stage in (0, 1, None)] == [1, 0.5, 0.5]
    assert [speed_of(FOUR, MeshSpec.parse("pp=4 placement=3-0-1-2"), stage) for stage in range(4)] == [0.5, 1, 1, 1]


def test_each_rank_of_pp_has_the_memory_of_its_smallest_device(tmp_path) -> None:
    sized = replace(FOUR, unlike=replace(FOUR.unlike, memory_bytes=(1e9, 1e9, 1e9, 5e8)))
    assert [memory_of(sized, MeshSpec.parse("pp=2 tp=2"), stage) for stage in (0, 1, None)] == [1e9, 5e8, 5e8]
    assert [memory_of(sized, MeshSpec.parse("pp=4 placement=3-0-1-2"), stage) for stage in (0, 3)] == [5e8, 1e9]
    assert memory_of(FOUR, MeshSpec.parse("pp=2 tp=2"), 0) == math.inf
    sized.write(tmp_path / "c.toml")
    assert Cluster.read(tmp_path / "c.toml") == sized


def test_the_slowest_pair_between_two_ranks_of_pp_is_waited_for() -> None:
    assert between_stages(FOUR, MeshSpec.parse("pp=2 tp=2"), MB, 0, 1) == pytest.approx(NEAR + MB / FAST)
    assert between_stages(FOUR, MeshSpec.parse("pp=2 tp=2 placement=0-2-1-3"), MB, 0, 1) == pytest.approx(
        FAR + MB / SLOW
    )
    assert hop_s(FOUR, MB, 2, 3) == pytest.approx(FAR + MB / SLOW)


def test_ranks_of_a_node_share_its_link() -> None:
    # dp_shard=3 goes over nodes, two groups at once over one card.
    assert seconds(NODES, "dp_shard=3 tp=2", "dp_shard", "all_gather") == pytest.approx(2 * FAR + 2 * MB / 3 * 2 / SLOW)
    assert seconds(NODES, "dp_shard=3 tp=2", "tp", "all_gather") == pytest.approx(1e-6 + MB / 2 / 1e10)
    # All six ranks: a step inside of a node, and two hops between nodes.
    assert seconds(NODES, "tp=6", "tp", "all_gather") == pytest.approx(1e-6 + 2 * FAR + 5 * MB / 6 / SLOW)


def test_links_that_are_the_tiers_cost_what_the_tiers_do() -> None:
    alike = Unlike(bytes_per_s=((FAST,) * 4,) * 4, latency_s=((NEAR,) * 4,) * 4, speed=(1.0,) * 4)
    even, plain = replace(FOUR, unlike=alike), replace(FOUR, unlike=None)
    for mesh, axis in (("tp=4", "tp"), ("dp_shard=2 tp=2", "dp_shard"), ("dp_shard=2 cp=2", "dp_shard_cp")):
        for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"):
            assert seconds(even, mesh, axis, op) == pytest.approx(seconds(plain, mesh, axis, op)), (mesh, axis, op)


def test_a_slowed_device_computes_so_much_slower() -> None:
    from meshkit.cluster import KernelCurve, Op, kernel_s

    curve = KernelCurve(dtype="float32", points=((8.0, 8.0, 8.0, 1e-6),))
    device = replace(DEVICE, curves=(curve,), memory_curve=((1e3, 1e-6), (1e6, 1e-3)))
    op = Op("matmul", "float32", 1e6, 1e6, 8, 8, 8, 1, 10.0, "forward")
    memory = Op("memory", "float32", 0, 0, 0, 0, 0, 1, 5e4, "forward")
    for each in (op, memory):
        for of in (device, DEVICE):
            assert kernel_s(of.slowed(0.25), each) == pytest.approx(4 * kernel_s(of, each))
    assert device.slowed(1.0) is device


def test_a_placement_of_alike_ranks_is_read_by_the_tiers() -> None:
    plain = replace(NODES, unlike=None)
    assert place_of(plain, MeshSpec.parse("dp_shard=3 tp=2 placement=4-5-0-1-2-3"), "tp") == Place(2, (2, 2))
    assert place_of(plain, MeshSpec.parse("dp_shard=3 tp=2 placement=0-2-1-3-4-5"), "tp") == Place(2, (1, 2))


def test_a_file_keeps_it(tmp_path) -> None:
    FOUR.write(tmp_path / "c.toml")
    assert Cluster.read(tmp_path / "c.toml") == FOUR


@pytest.mark.parametrize(
    ("unlike", "words"),
    [
        ({}, "unlike says nothing"),
        ({"speed": (1, 2)}, "shares of the device's speed, at least 0.001 and at most 1"),
        ({"speed": 0.5}, "a number for each block"),
        ({"speed": ((1, 1),)}, "a number for each block"),
        ({"bytes_per_s": (1, 2), "latency_s": (1, 2)}, "a row of numbers for each"),
        ({"bytes_per_s": RATES, "latency_s": ((0,),)}, "belong together"),
        ({"bytes_per_s": ((1, 1e-300), (1, 1)), "latency_s": ((1, 1), (1, 1))}, "numbers are at least 1"),
        ({"speed": (0, 1)}, "shares of the device's speed"),
        ({"bytes_per_s": RATES}, "belong together"),
        ({"bytes_per_s": RATES[:3], "latency_s": LATENCIES}, "not as many numbers in each"),
        ({"bytes_per_s": ((1, 0), (1, 1)), "latency_s": ((1, 1), (1, 1))}, "numbers are at least 1"),
        (
            {"speed": (1, 1), "bytes_per_s": RATES, "latency_s": LATENCIES},
            "speed is of 2 blocks, bytes_per_s is of 4 blocks",
        ),
        ({"memory_bytes": (1e9, 0)}, "bytes of a device of each block, at least 1"),
        ({"memory_bytes": 1e9}, "speed and memory_bytes are a number for each block"),
        ({"speed": (1, 1), "memory_bytes": (1e9,) * 4}, "speed is of 2 blocks, memory_bytes is of 4 blocks"),
        ({"each": 0, "speed": (1,)}, "ranks of a block, at least 1"),
    ],
)
def test_what_no_machine_could_be_is_refused(unlike, words) -> None:
    with pytest.raises(ClusterError, match=words):
        Unlike(**unlike)


@pytest.mark.parametrize(
    ("unlike", "words"),
    [
        (Unlike(speed=(1, 1)), "2 blocks of 1, 2 ranks, but the last tier holds 4"),
        (Unlike(each=2, speed=(1, 0.5)), "Blocks are of"),
        (Unlike(memory_bytes=(2e9, 1e9, 1e9, 1e9)), "devices of 2e.09 bytes, but the largest's are"),
    ],
)
def test_what_does_not_fit_the_cluster_is_refused(unlike, words) -> None:
    with pytest.raises(ClusterError, match=words):
        replace(FOUR, unlike=unlike)


def test_a_link_better_than_the_tiers_is_refused() -> None:
    with pytest.raises(ClusterError, match="the tiers' best is 1e.09"):
        replace(FOUR, unlike=Unlike(bytes_per_s=((2e9,) * 4,) * 4, latency_s=LATENCIES))
