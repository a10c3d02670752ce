"""The mesh of a replica: the ranks that share a place on dp_replicate, with all other axes."""

from __future__ import annotations

import pytest

import meshkit as mk
from meshkit.mesh import replica_mesh
from tests.world import pool

SPECS = ["dp_replicate=2", "pp=2 dp_replicate=2", "pp=2 dp_replicate=2 tp=2", "dp_replicate=2 dp_shard=2 cp=2 ep=2"]


def replica_of(spec: str) -> tuple[tuple[int, ...], int, str, bool, list[tuple[int, int]]]:
    mesh = mk.init_mesh(spec)
    own = replica_mesh(mesh)
    axes = ("pp", "dp_shard", "cp", "tp")
    places = [(own[axis].get_local_rank(), mesh[axis].get_local_rank()) for axis in axes]
    alike = all(own[axis].mesh.flatten().tolist() == mesh[axis].mesh.flatten().tolist() for axis in axes)
    own.agreement.meet("a call of one replica", facts={"replica": mesh["dp_replicate"].get_local_rank()})
    return own.ranks, own.rank, str(own.spec), alike and own.spec.dp_replicate == 1, places


@pytest.mark.parametrize("spec", SPECS)
def test_a_replica_has_the_other_axes_of_its_ranks(spec: str) -> None:
    whole = mk.MeshSpec.parse(spec)
    found = pool(whole.world_size).run(replica_of, spec)
    groups = whole.groups(*(axis for axis in ("pp", "dp_shard", "cp", "tp") if getattr(whole, axis) > 1)) or []
    for rank, (ranks, at, _, alike, places) in enumerate(found):
        expected = next((group for group in groups if rank in group), [rank])
        if whole.world_size == whole.dp_replicate:
            expected = [rank]
        assert list(ranks) == expected and ranks[at] == rank and alike
        assert all(one == two for one, two in places)


def without_replicas() -> bool:
    mesh = mk.init_mesh("dp_shard=2")
    return replica_mesh(mesh) is mesh


def test_without_replicas_it_is_the_mesh_itself() -> None:
    assert all(pool(2).run(without_replicas))
