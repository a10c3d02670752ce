"""A nested dp_shard: its sizes, its groups by a closed form, its process groups, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import meshkit as mk
from meshkit.errors import MeshError
from meshkit.mesh import MeshSpec, axes_of, fake_world
from meshkit.mesh.groups import group_axes
from meshkit.strategy import DataPolicy, Strategy
from tests.world import pool


def test_nodes_times_ranks_of_a_node_are_dp_shard() -> None:
    spec = MeshSpec.parse("dp_replicate=2 dp_shard=4x8")
    assert (spec.dp_shard, spec.dp_inter, spec.dp_intra, spec.world_size) == (32, 4, 8, 64)
    assert MeshSpec.parse("dp_shard=-1x8 tp=2").resolve(64) == MeshSpec(dp_shard=32, dp_intra=8, tp=2)
    assert MeshSpec.parse("dp_shard=32 dp_intra=8") == MeshSpec.parse("dp_shard=4x8")
    assert MeshSpec.parse("dp_shard=4").resolve(4).dp_inter == 4


def test_groups_of_parts_are_those_of_the_grid() -> None:
    spec = MeshSpec.parse("dp_replicate=2 dp_shard=2x3 cp=2 tp=2").resolve(48)
    grid = torch.arange(48).view(2, 2, 3, 2, 2)
    assert spec.groups("dp_inter") == grid.movedim(1, -1).reshape(-1, 2).tolist()
    assert spec.groups("dp_intra", "cp") == sorted(grid.movedim((2, 3), (-2, -1)).reshape(-1, 6).tolist())
    assert spec.groups("dp_replicate", "dp_inter") == sorted(grid.movedim((0, 1), (-2, -1)).reshape(-1, 4).tolist())
    assert spec.groups("dp_inter", "dp_intra") == spec.groups("dp_shard")
    experts = MeshSpec.parse("dp_shard=2x2 tp=2 ep=4").resolve(8)
    assert (experts.edp, experts.edp_inter, experts.edp_intra) == (2, 2, 1)
    assert experts.groups("edp_inter") == experts.groups("edp")


def test_the_same_ranks_have_one_name() -> None:
    spec = MeshSpec.parse("dp_replicate=2 dp_shard=2x2 cp=2")
    assert group_axes(spec, "dp_inter", "dp_intra", "cp") == ("dp_shard", "cp")
    assert group_axes(MeshSpec.parse("dp_shard=1x4"), "dp_intra") == ("dp_shard",)
    assert group_axes(MeshSpec.parse("dp_shard=4"), "dp_inter", "dp_intra") == ("dp_shard",)
    assert axes_of("dp_replicate_dp_inter") == ("dp_replicate", "dp_inter")
    assert axes_of("edp_intra") == ("edp_intra",)


def sums() -> list[float]:
    """Of the ranks' numbers over parts of a mesh."""
    mesh = mk.init_mesh("dp_replicate=2 dp_shard=2x2")
    found = []
    for axes in (("dp_intra",), ("dp_inter",), ("dp_replicate", "dp_inter"), ("dp_inter", "dp_intra")):
        value = torch.tensor([2.0**mesh.rank])
        over = mesh.over(*axes)
        dist.all_reduce(value, group=over.get_group())
        assert over is mesh.over(*axes) or over.get_group().group_name == mesh.over(*axes).get_group().group_name
        found.append(float(value))
    assert mesh["dp_intra"].size() == 2
    return found


def test_ranks_meet_in_the_groups_of_the_spec() -> None:
    spec = MeshSpec.parse("dp_replicate=2 dp_shard=2x2")
    for rank, found in enumerate(pool(8).run(sums)):
        axes = (("dp_intra",), ("dp_inter",), ("dp_replicate", "dp_inter"), ("dp_inter", "dp_intra"))
        of_rank = [next(group for group in spec.groups(*each) if rank in group) for each in axes]
        assert found == [sum(2.0**member for member in group) for group in of_rank]


def test_a_mesh_says_which_links_its_parts_are_on() -> None:
    text = MeshSpec.parse("dp_shard=2x4").describe(ranks_per_node=4)
    assert "dp_inter        2  inter-node (2 nodes a group)" in text
    assert "dp_intra        4  intra-node" in text


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("dp_shard=2xtwo", "the size of 'dp_shard' is '2xtwo', not a whole number"),
        ("tp=2x2", "the size of 'tp' is '2x2', not a whole number"),
        ("dp_intra=2 dp_shard=2x2", "dp_intra is given twice, and as '2x2'. Keep one"),
        ("dp_shard=2x2 dp_intra=2", "axis 'dp_intra' is given twice"),
        ("dp_intra=-1", "only pp, dp_replicate, dp_shard, cp, tp can be -1"),
    ],
)
def test_a_text_that_is_no_nesting_is_refused(text: str, match: str) -> None:
    with pytest.raises(MeshError, match=match):
        MeshSpec.parse(text)


def test_nodes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        MeshError, match="the 6 ranks of dp_shard are no whole number of nodes with 4. Choose a divisor of 6"
    ):
        MeshSpec(dp_shard=6, dp_intra=4).resolve(6)
    with pytest.raises(MeshError, match=r"needs ep\*etp=4 to divide the dp_intra\*cp\*tp=2 ranks of a node"):
        MeshSpec.parse("dp_shard=2x2 ep=4").resolve(4)


def test_rows_and_nodes_are_read_back_from_a_file() -> None:
    strategy = Strategy(mesh="dp_shard=2x2", data=DataPolicy(parameters="node", states="replicas", gather="int8"))
    assert Strategy.from_toml(strategy.to_toml()) == strategy


def test_a_replica_of_a_mesh_keeps_its_nodes() -> None:
    with fake_world(8):
        mesh = mk.mesh.replica_mesh(mk.init_mesh("dp_replicate=2 dp_shard=2x2", device_type="cpu"))
        assert mesh.spec == MeshSpec(dp_shard=4, dp_intra=2)
        assert mesh["dp_inter"].size() == 2
