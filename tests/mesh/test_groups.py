"""The process groups of a mesh: how many a rank has, and by how many calls they are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import device_mesh, distributed_c10d

import meshkit as mk
from meshkit.mesh import DENSE_AXES, EXPERT_AXES, MeshSpec, fake_world
from meshkit.mesh.groups import group_axes, made_at_once
from tests.world import pool

LARGE = (
    "pp=8 dp_shard=16 tp=8",
    "dp_shard=64 cp=2 tp=8 ep=32",
    "dp_replicate=8 dp_shard=128",
    "pp=2 dp_replicate=2 dp_shard=32 cp=2 tp=4 ep=4 etp=2",
    "pp=16 dp_replicate=2 dp_shard=32 cp=2 tp=8 ep=64 etp=2",
)
AT_MOST = 12


def counted(function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    return call


def made_and_called(text: str) -> tuple[int, Counter[str]]:
    """(groups of a rank in the middle of a fake world, calls that made them)"""
    spec = MeshSpec.parse(text)
    calls: Counter[str] = Counter()
    with ExitStack() as stack:
        for name in ("new_group", "split_group"):
            function = counted(getattr(dist, name), calls)
            for owner in (dist, distributed_c10d, device_mesh):
                stack.enter_context(patch.object(owner, name, function))
        rank = spec.world_size // 2
        stack.enter_context(fake_world(spec.world_size, rank=rank))
        mesh = mk.init_mesh(text, device_type="cpu")
        _ = mesh.expert_ranks
        return sum(rank in ranks for ranks in distributed_c10d._world.pg_group_ranks.values()), calls


@pytest.mark.parametrize("text", LARGE)
def test_a_rank_has_at_most_twelve_groups_made_by_as_many_calls(text: str) -> None:
    groups, calls = made_and_called(text)
    assert groups <= AT_MOST
    assert sum(calls.values()) == groups - 1  # all but the world


@given(st.fixed_dictionaries(dict.fromkeys((*DENSE_AXES, "ep", "etp"), st.sampled_from([1, 2, 4]))))
def test_no_mesh_has_more(sizes: dict[str, int]) -> None:
    spec = MeshSpec(**sizes)
    if spec.dp_shard * spec.cp * spec.tp % (spec.ep * spec.etp):
        return
    made = made_at_once(spec)
    assert len(made) + 1 <= AT_MOST
    assert len(made) == len(set(made))
    # Each axis has the group of all ranks, or one that is made.
    for axis in (*DENSE_AXES, *EXPERT_AXES):
        key = group_axes(spec, axis)
        lazy = axis == "edp" and spec.ep * spec.etp == 1
        assert lazy or key in made or prod(getattr(spec, each) for each in key) == spec.world_size


@pytest.mark.parametrize("text", ["pp=2 tp=2", "dp_shard=2 cp=2 ep=2"])
def test_axes_of_one_rank_are_meshes_of_one_group_for_any_torch_api(text: str) -> None:
    for shared, total, sizes in pool(4).run(alone, text):
        assert shared == 1  # one group for all of them
        assert total == [5.0, 5.0, 5.0]
        assert sizes == MeshSpec.parse(text).sizes((*DENSE_AXES, *EXPERT_AXES))


def alone(text: str) -> tuple[int, list[float], dict[str, int]]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mk.init_mesh(text)
    names = [axis for axis in (*DENSE_AXES, *EXPERT_AXES) if mesh[axis].size() == 1]
    value = torch.tensor([5.0])
    gathered, scattered = torch.zeros(1), torch.zeros(1)
    dist.all_gather_into_tensor(gathered, value, group=mesh[names[0]].get_group())
    dist.reduce_scatter_tensor(scattered, value, group=mesh[names[0]].get_group())
    shard = distribute_tensor(value, mesh[names[0]], [Shard(0)]).redistribute(placements=[Replicate()]).to_local()
    sizes = {axis: mesh[axis].size() for axis in (*DENSE_AXES, *EXPERT_AXES)}
    one = {mesh[axis].get_group().group_name for axis in names}
    return len(one), [gathered.item(), scattered.item(), shard.item()], sizes
