"""Where a mesh axis lies on the tiers of a cluster (topology mapping): how many of its ranks are in each node, each rail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from operator import neg

from meshkit.cluster._cluster import Cluster, Tier
from meshkit.cluster._unlike import Link
from meshkit.errors import ClusterError
from meshkit.mesh import DENSE_AXES, EXPERT_AXES, MeshSpec
from meshkit.mesh.spec import axes_of


@dataclass(frozen=True)
class Place:
    """A group of ranks on nested tiers. inside: how many of its `ranks` one block of each tier holds at most.

    ring, mutual: of unlike links the slowest that a ring through it crosses, and of those between any two of it.
    """

    ranks: int
    inside: tuple[int, ...]
    ring: Link | None = None
    mutual: Link | None = None

    @property
    def outermost(self) -> int:
        """Index of the innermost tier that holds the whole group."""
        return next(index for index, count in enumerate(self.inside) if count == self.ranks)


def place_of(cluster: Cluster, spec: MeshSpec, axis: str, *, stage: int | None = None) -> Place:
    """The place of the first group of an axis, or of several axes as one ("dp_shard_cp"). Rank r of the mesh is rank
    spec.placement[r] here.

    With a placement, the place of the group that crosses most; of unlike links the slowest of all groups counts, or of those
    of one rank of pp: all wait for the slowest. Raises: ClusterError for a mesh that the cluster does not hold.
    """
    if spec.world_size > cluster.ranks:
        raise ClusterError(
            f"the mesh has {spec.world_size} ranks, but cluster {cluster.name!r} holds {cluster.ranks}. Use a smaller mesh, "
            "or give its last tier more ranks."
        )
    tiers = tuple(tier.ranks for tier in cluster.tiers)
    if cluster.unlike is None and not spec.placement:
        return _placed(tiers, members(spec, axis))
    groups = groups_of(spec, axis)
    if stage is not None and "pp" not in _names(axis):
        first, end = ranks_of_stage(spec, stage)
        groups = [group for group in groups if first <= group[0] < end]
    if spec.placement:
        groups = [tuple(spec.placement[rank] for rank in group) for group in groups]
    place = max(
        (_placed(tiers, group) for group in groups), key=lambda place: (place.outermost, *map(neg, place.inside))
    )
    if cluster.unlike is None:
        return place
    return replace(place, ring=cluster.unlike.ring(groups), mutual=cluster.unlike.mutual(groups))


def ranks_of_stage(spec: MeshSpec, stage: int) -> tuple[int, int]:
    """Of a rank of pp, which is the slowest axis: the first of its ranks of the mesh, and the one after the last."""
    count = spec.world_size // spec.pp
    return stage * count, (stage + 1) * count


def speed_of(cluster: Cluster, spec: MeshSpec, stage: int | None) -> float:
    """Of the slowest rank of those of a rank of pp; None, of the mesh. A share of `device`'s."""
    return 1.0 if cluster.unlike is None else cluster.unlike.speed_of(_seats(spec, stage))


def memory_of(cluster: Cluster, spec: MeshSpec, stage: int | None) -> float:
    """Bytes of the device that has least of those of a rank of pp; None, of the mesh. Infinite where all are alike."""
    return math.inf if cluster.unlike is None else cluster.unlike.memory_of(_seats(spec, stage))


def _seats(spec: MeshSpec, stage: int | None) -> Sequence[int]:
    """Ranks of the cluster on which those of a rank of pp, or of the mesh, sit."""
    seats = spec.placement or range(spec.world_size)
    return seats if stage is None else seats[slice(*ranks_of_stage(spec, stage))]


def groups_of(spec: MeshSpec, axis: str) -> list[tuple[int, ...]]:
    """The ranks of the mesh of each of an axis' groups."""
    return _groups_of(replace(spec, placement=()) if spec.placement else spec, axis)


@lru_cache(maxsize=4096)
def _groups_of(spec: MeshSpec, axis: str) -> list[tuple[int, ...]]:
    return [tuple(group) for group in spec.groups(*_names(axis))]


@lru_cache(maxsize=4096)
def members(spec: MeshSpec, axis: str) -> tuple[int, ...]:
    """The ranks of the axis' first group."""
    names = spec.parts(*_names(axis))
    dense = spec.parts(*DENSE_AXES)
    view = dense if {*names} <= {*dense} else spec.parts(*EXPERT_AXES)
    strides = {name: prod(getattr(spec, inner) for inner in view[at + 1 :]) for at, name in enumerate(view)}
    indices = product(*(range(getattr(spec, name)) for name in names))
    return tuple(sum(index * strides[name] for name, index in zip(names, at, strict=True)) for at in indices)


def _names(axis: str) -> tuple[str, ...]:
    return axes_of(axis) if axis != "mesh" else DENSE_AXES


@lru_cache(maxsize=4096)
def _placed(tiers: tuple[int, ...], ranks: tuple[int, ...]) -> Place:
    inside = []
    for size in tiers:
        counts: dict[int, int] = {}
        for rank in ranks:
            counts[rank // size] = counts.get(rank // size, 0) + 1
        inside.append(max(counts.values()))
    return Place(len(ranks), tuple(inside))


def place_of_stages(cluster: Cluster, spec: MeshSpec, one: int, other: int) -> Place:
    """Of the message from one rank of pp to another: all its ranks send at once, of which the slowest counts."""
    pairs = list(zip(range(*ranks_of_stage(spec, one)), range(*ranks_of_stage(spec, other)), strict=True))
    if spec.placement:
        pairs = [(spec.placement[here], spec.placement[there]) for here, there in pairs]
    return place_of_pairs(cluster, pairs if spec.placement or cluster.unlike is not None else pairs[:1])


def place_of_pairs(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> Place:
    """Of the pair of ranks that are furthest from each other."""
    tiers = tuple(tier.ranks for tier in cluster.tiers)
    place = max((_placed(tiers, pair) for pair in pairs), key=lambda place: place.outermost)
    return place if cluster.unlike is None else replace(place, ring=cluster.unlike.slowest(set(pairs)))


def tier_of(cluster: Cluster, place: Place) -> Tier:
    """The slowest tier that the group's messages cross."""
    return cluster.tiers[place.outermost]
