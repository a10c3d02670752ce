"""The process groups of a mesh: how many a rank has, by how many calls, and how many sockets."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from contextlib import ExitStack
from math import prod
from pathlib import Path
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
from tests.world import fork, pool

LARGE = (
    "pp=8 dp_shard=16 tp=8",
    "dp_shard=64 cp=2 tp=8 ep=32",
    "dp_replicate=8 dp_shard=128",
    "pp=2 dp_replicate=2 dp_shard=32 cp=2 tp=4 ep=4 etp=2",
    "pp=16 dp_replicate=2 dp_shard=32 cp=2 tp=8 ep=64 etp=2",
)
AT_MOST = 12


def made_and_called(text: str) -> tuple[int, Counter[str]]:
    """(groups of a rank in the middle of a fake world, calls that made them)"""
    spec = MeshSpec.parse(text)
    calls: Counter[str] = Counter()
    with ExitStack() as stack:
        for name in ("new_group", "split_group"):

            def counted(*args: Any, name: str = name, original: Any = getattr(dist, name), **kwargs: Any) -> Any:
                calls[name] += 1
                return original(*args, **kwargs)

            for owner in (dist, distributed_c10d, device_mesh):
                stack.enter_context(patch.object(owner, name, counted))
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


# ----------------------------------------------------------------------------------------------------------------- sockets


def open_sockets() -> int:
    found = 0
    for each in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{each}").startswith("socket:")
        except OSError:  # of this listing itself
            continue
    return found


def count_sockets(rank: int, size: int, port: int, text: str, lazily: bool, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if not lazily:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    before = open_sockets()
    mesh = mk.init_mesh(text, device_type="cpu")
    made = open_sockets() - before
    every: list[Any] = [None] * size
    dist.all_gather_object(every, rank)
    dist.broadcast_object_list(every, src=0)
    dist.barrier()
    used = open_sockets() - before
    apart = dist.split_group(mesh.group, [list(range(size))])  # what a first message costs, on a group of its own
    start = open_sockets()
    dist.all_gather_object(every, rank, group=apart)
    ring = open_sockets() - start
    dist.barrier(group=apart)
    Path(folder, f"{rank}.json").write_text(json.dumps([made, used, ring, open_sockets() - start]))
    dist.barrier()
    os._exit(0)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="gloo is not split")
@pytest.mark.parametrize(("lazily", "made"), [(True, 24), (False, 24)], ids=["when used", "each with each"])
def test_sockets_of_a_rank_are_those_over_which_it_has_sent(lazily: bool, made: int, tmp_path: Path) -> None:
    size, text = 8, "pp=2 dp_shard=2 tp=2"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [fork(count_sockets, rank, size, store.port, text, lazily, str(tmp_path)) for rank in range(size)]
    for each in ranks:
        each.join(60)
    assert [each.exitcode for each in ranks] == [0] * size
    counts = [json.loads(path.read_text()) for path in tmp_path.iterdir() if re.match(r"\d+\.json", path.name)]
    print("sockets:", lazily, counts)
    assert len(counts) == size
    assert max(count[0] for count in counts) <= made
    if lazily:
        assert all(ring == 2 and meeting <= 2 * 3 for _, _, ring, meeting in counts)
