"""Where a mesh axis lies on the tiers of a cluster (topology mapping): how many of its ranks are in each node, each rail."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from meshkit.cluster._cluster import Cluster, Tier
from meshkit.errors import ClusterError
from meshkit.mesh import DENSE_AXES, EXPERT_AXES, MeshSpec
from meshkit.mesh.spec import axes_of


@dataclass(frozen=True)
class Place:
    """A group of ranks on nested tiers. inside: how many of its `ranks` one block of each tier holds at most."""

    ranks: int
    inside: tuple[int, ...]

    @property
    def outermost(self) -> int:
        """Index of the innermost tier that holds the whole group."""
        return next(index for index, count in enumerate(self.inside) if count == self.ranks)


def place_of(cluster: Cluster, spec: MeshSpec, axis: str) -> Place:
    """The place of the first group of an axis, or of several axes as one ("dp_shard_cp"). Rank r of the mesh is rank r here.

    Raises: ClusterError for a mesh that the cluster does not hold.
    """
    if spec.world_size > cluster.ranks:
        raise ClusterError(
            f"the mesh has {spec.world_size} ranks, but cluster {cluster.name!r} holds {cluster.ranks}. Use a smaller mesh, "
            "or give its last tier more ranks."
        )
    return _placed(tuple(tier.ranks for tier in cluster.tiers), members(spec, axis))


@lru_cache(maxsize=4096)
def members(spec: MeshSpec, axis: str) -> tuple[int, ...]:
    """The ranks of the axis' first group."""
    names = spec.parts(*(axes_of(axis) if axis != "mesh" else DENSE_AXES))
    dense = spec.parts(*DENSE_AXES)
    view = dense if {*names} <= {*dense} else spec.parts(*EXPERT_AXES)
    strides = {name: prod(getattr(spec, inner) for inner in view[at + 1 :]) for at, name in enumerate(view)}
    indices = product(*(range(getattr(spec, name)) for name in names))
    return tuple(sum(index * strides[name] for name, index in zip(names, at, strict=True)) for at in indices)


@lru_cache(maxsize=4096)
def _placed(tiers: tuple[int, ...], ranks: tuple[int, ...]) -> Place:
    inside = []
    for size in tiers:
        counts: dict[int, int] = {}
        for rank in ranks:
            counts[rank // size] = counts.get(rank // size, 0) + 1
        inside.append(max(counts.values()))
    return Place(len(ranks), tuple(inside))


def place_of_pair(cluster: Cluster, one: int, other: int) -> Place:
    """Of two ranks, by their numbers."""
    return _placed(tuple(tier.ranks for tier in cluster.tiers), (one, other))


def tier_of(cluster: Cluster, place: Place) -> Tier:
    """The slowest tier that the group's messages cross."""
    return cluster.tiers[place.outermost]
