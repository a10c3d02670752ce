"""The process groups of a mesh (communicators, subgroups): which there are, from its spec alone, and their making.

One group of all ranks of the mesh, one for each axis that is larger than 1, one for each set of axes that blocks take as one,
and one of each rank alone, which axes of size 1 share. An axis of all ranks has the group of all ranks, as in torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from meshkit.core import _torch
from meshkit.core.calls import name_group
from meshkit.mesh.spec import DENSE_AXES, EXPERT_AXES, MeshSpec

SHARD, TOKENS, EXPERTS = ("dp_shard", "cp"), ("dp_replicate", "dp_shard", "cp"), ("ep", "etp")
"""Axes that are taken as one: over which fully_shard shards, with different tokens, and that share the experts of a copy."""

Axes = tuple[str, ...]
ALONE: Axes = ()


def group_axes(spec: MeshSpec, *axes: str) -> Axes:
    """The axes whose group is that of these: without axes of size 1, and in the dense view where no experts are folded."""
    if axes == ("edp",) and spec.ep * spec.etp == 1:
        axes = ("dp_shard", "cp", "tp")
    return tuple(axis for axis in axes if getattr(spec, axis) > 1)


def made_at_once(spec: MeshSpec) -> list[Axes]:
    """The groups that `init_mesh` makes, by their axes, in its order: those of the expert view only where there is one."""
    dense = [*((axis,) for axis in DENSE_AXES), SHARD, TOKENS]
    expert = [*((axis,) for axis in EXPERT_AXES), EXPERTS] if spec.ep * spec.etp > 1 else [ALONE]
    return _missing(spec, [*dense, *expert], ())


def _missing(spec: MeshSpec, wanted: Iterable[Axes], known: Iterable[Axes]) -> list[Axes]:
    """Which of them have to be made. A group of all ranks is there already, and one of a rank alone in a mesh of one rank."""
    keys = dict.fromkeys(group_axes(spec, *axes) for axes in wanted)
    sizes = {key: len(spec.groups(*key)[0]) if key else 1 for key in keys}
    return [key for key in keys if key not in known and sizes[key] < spec.world_size]


def partition(spec: MeshSpec, ranks: Sequence[int], axes: Axes) -> list[list[int]]:
    """The ranks of the world in each group of these axes, of a mesh on `ranks`."""
    groups = spec.groups(*axes) if axes else [[index] for index in range(len(ranks))]
    return [[ranks[index] for index in group] for group in groups]


@dataclass(frozen=True)
class MeshGroups:
    """This rank's groups of a mesh. all: of all its ranks."""

    spec: MeshSpec
    ranks: tuple[int, ...]
    all: dist.ProcessGroup
    by_axes: dict[Axes, dist.ProcessGroup]
    timeout: timedelta

    def of(self, *axes: str) -> dist.ProcessGroup:
        return self.by_axes.get(group_axes(self.spec, *axes), self.all)

    def make(self, wanted: Iterable[Axes]) -> list[dist.ProcessGroup]:
        """Make those that are not there; returns them. A collective of all ranks of the mesh, and of no others."""
        axes = _missing(self.spec, wanted, self.by_axes)
        made = _torch.split(self.all, [partition(self.spec, self.ranks, key) for key in axes], timeout=self.timeout)
        groups = [group for group in made if group is not None]
        self.by_axes.update(zip(axes, groups, strict=True))
        for key, group in zip(axes, groups, strict=True):
            name_group(group.group_name, "_".join(key))
        return groups


def make_groups(spec: MeshSpec, ranks: Sequence[int], timeout: timedelta | None) -> MeshGroups | None:
    """The groups of a mesh on `ranks`; None on a rank outside.

    A collective of the world, of which the ranks outside take part in the first alone: the group of `ranks`. All others are
    split from that one.
    """
    world = _torch.world()
    timeout = timeout or _torch.timeout_of(world)
    part = [world] if len(ranks) == world.size() else _torch.split(world, [[ranks]], timeout=timeout)
    if part[0] is None:
        return None
    groups = MeshGroups(spec, tuple(ranks), part[0], {}, timeout)
    name_group(part[0].group_name, "_".join(group_axes(spec, *DENSE_AXES)))
    groups.make(made_at_once(spec))
    return groups
