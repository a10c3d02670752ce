from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshkit as mk
from meshkit.mesh import DENSE_AXES, EXPERT_AXES, Mesh, MeshSpec
from tests.world import pool

sizes = st.sampled_from([1, 2, 3, 4])


@given(st.fixed_dictionaries(dict.fromkeys(DENSE_AXES, sizes)))
def test_the_groups_of_an_axis_are_a_partition_of_the_ranks(dense: dict[str, int]) -> None:
    spec = MeshSpec(**dense)
    world = prod(dense.values())
    for axis in (*DENSE_AXES, *EXPERT_AXES):
        groups = spec.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert {len(group) for group in groups} == {getattr(spec, axis)}


@given(st.fixed_dictionaries(dict.fromkeys(DENSE_AXES, sizes)), st.sampled_from(DENSE_AXES))
def test_minus_one_is_the_ranks_that_are_left(dense: dict[str, int], free: str) -> None:
    assert MeshSpec(**{**dense, free: -1}).resolve(prod(dense.values())) == MeshSpec(**dense)


def test_tp_is_innermost_and_pp_outermost() -> None:
    spec = MeshSpec(pp=2, dp_shard=2, tp=2)
    assert spec.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert spec.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_the_expert_view_folds_the_ranks_of_the_dense_view() -> None:
    spec = MeshSpec(dp_shard=2, tp=2, ep=4)
    assert spec.edp == 1
    assert spec.groups("ep") == [[0, 1, 2, 3]]


def test_minus_one_without_a_world_is_refused() -> None:
    for text in ("dp_shard=-1", "dp_shard=-1 tp=2"):
        with pytest.raises(mk.errors.MeshError, match="dp_shard=-1 is what is left"):
            mk.Strategy(mesh=text).mesh_for()
    assert mk.Strategy(mesh="dp_shard=-1 tp=2").mesh_for(4).dp_shard == 2


def test_describe_says_links_without_ranks() -> None:
    text = MeshSpec(dp_shard=4, tp=4).describe(ranks_per_node=8)
    assert "[0, 1, 2, 3]" in text
    assert "inter-node (2 nodes a group)" in text
    assert next(line for line in text.splitlines() if " tp " in line).count("intra-node") == 1


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("tp=3", "tp=3 needs a multiple of 3 ranks, but the world has 8"),
        ("dp_shard=2 tp=2", "uses 4 of the 8 ranks"),
        ("tpp=2", "there is no axis 'tpp'. Did you mean 'tp'"),
        ("tp=2 placment=1-0", "there is no axis 'placment'. Did you mean 'placement'"),
        ("dp=2", "there is no axis 'dp'. Parameters are sharded over dp_shard .*copied over dp_replicate"),
        ("sp=2", "there is no axis 'sp'. Sequence parallelism lies on tp"),
        ("tp", "'tp' is not axis=size"),
        ("tp=two", "the size of 'tp' is 'two', not a whole number"),
        ("tp=0", "tp=0: an axis size is a whole number of at least 1"),
        ("tp=2 tp=4", "axis 'tp' is given twice"),
        ("dp_shard=-1 tp=-1", "only one axis can be -1"),
        ("ep=-1", "ep=-1: only pp, dp_replicate"),
        ("dp_shard=8 ep=3", "needs ep\\*etp=3 to divide dp_shard\\*cp\\*tp=8\\*1\\*1=8"),
    ],
)
def test_impossible_meshes_are_refused_with_the_arithmetic(text: str, match: str) -> None:
    with pytest.raises(mk.errors.MeshError, match=match):
        MeshSpec.parse(text).resolve(8)


@pytest.mark.parametrize(
    ("name", "match"), [("device", "Did you mean 'device_type'"), ("tpp", "Did you mean 'tp'"), ("dp", "dp_shard")]
)
def test_an_argument_that_is_no_axis_is_named_as_such(name: str, match: str) -> None:
    with pytest.raises(mk.MeshkitError, match=rf"init_mesh\({name}=2\): there is no axis '{name}'. .*{match}"):
        mk.init_mesh("dp_shard=1", **{name: 2})


def test_a_mesh_that_is_neither_text_nor_spec_is_refused() -> None:
    with pytest.raises(mk.errors.MeshError, match=r"init_mesh\(spec={'tp': 2}\): give a text, as 'dp_shard=2 tp=2'"):
        mk.init_mesh({"tp": 2})  # type: ignore[arg-type]


def groups_of(text: str) -> dict[str, list[int]]:
    import torch.distributed as dist

    mesh = mk.init_mesh(text)
    axes = {axis: mesh[axis] for axis in (*DENSE_AXES, *EXPERT_AXES)}
    assert all(mesh[axis] is sliced for axis, sliced in axes.items())
    found = {axis: dist.get_process_group_ranks(part.get_group()) for axis, part in axes.items()}
    return {**found, "tokens": dist.get_process_group_ranks(mesh.tokens.get_group()), "data": [mesh.data_rank]}


@pytest.mark.parametrize("text", ["tp=4", "dp_shard=2 tp=2", "dp_replicate=2 dp_shard=2", "dp_shard=2 cp=2 ep=2"])
def test_the_groups_of_a_real_mesh_are_those_described(text: str) -> None:
    spec = MeshSpec.parse(text)
    for rank, found in enumerate(pool(4).run(groups_of, text)):
        for axis in (*DENSE_AXES, *EXPERT_AXES):
            assert found[axis] == next(group for group in spec.groups(axis) if rank in group), axis
        assert len(found["tokens"]) == spec.dp_replicate * spec.dp_shard * spec.cp


def refused(text: str) -> str:
    from torch import nn

    with pytest.raises(mk.MeshkitError) as error:
        mk.parallelize(nn.Linear(2, 2), mk.init_mesh(text))
    return str(error.value)


@pytest.mark.parametrize("axis", ["ep", "etp"])
def test_axes_for_experts_are_refused_without_experts(axis: str) -> None:
    (text,) = set(pool(2).run(refused, f"dp_shard=2 {axis}=2"))
    assert text.startswith("expert_parallel: ep=") and f"{axis}=2" in text
    assert "the plan has no experts(). Name the modules that hold stacked experts, or leave ep and etp away." in text


def wrong_axis() -> str:
    with pytest.raises(mk.errors.MeshError) as error:
        mk.init_mesh("tp=2")["dp_shards"]
    return str(error.value)


def test_asking_for_an_unknown_axis_names_the_nearest() -> None:
    assert "Did you mean 'dp_shard'?" in pool(2).run(wrong_axis)[0]


@pytest.mark.parametrize(("tp", "multiple"), [(1, 8), (2, 8), (3, 24), (16, 16)])
def test_short_rows_can_be_split_over_tp(tp: int, multiple: int) -> None:
    mesh = Mesh(spec=MeshSpec(tp=tp), ranks=(), members=None, dense=None, data=None, tokens=None)
    assert mesh.row_multiple == multiple
