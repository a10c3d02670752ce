"""The process groups of a mesh (communicators, subgroups): which there are, from its spec alone, and their making.

One group of all ranks of the mesh, one for each axis that is larger than 1, one for each set of axes that blocks take as one,
and one of each rank alone, which axes of size 1 share. An axis of all ranks has the group of all ranks, as in torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from meshkit.core import _torch
from meshkit.core.calls import name_group
from meshkit.mesh.spec import DENSE_AXES, EXPERT_AXES, NESTED, MeshSpec

SHARD, TOKENS, EXPERTS = ("dp_shard", "cp"), ("dp_replicate", "dp_shard", "cp"), ("ep", "etp")
"""Axes that are taken as one: over which fully_shard shards, with different tokens, and that share the experts of a copy."""

Axes = tuple[str, ...]
ALONE: Axes = ()
Partition = tuple[tuple[int, ...], ...]
"""ranks of the world, in groups"""


def group_axes(spec: MeshSpec, *axes: str) -> Axes:
    """The axes whose group is that of these: without axes of size 1, and in the dense view where no experts are folded."""
    if axes == ("edp",) and spec.ep * spec.etp == 1:
        axes = ("dp_shard", "cp", "tp")
    large = [axis for axis in axes if getattr(spec, axis) > 1]
    # One name for the same ranks: of one node, or of nodes of one rank, a nested axis is the whole.
    whole = {
        part: axis for axis, parts in NESTED.items() for part in parts if getattr(spec, part) == getattr(spec, axis)
    }
    names = [whole.get(axis, axis) for axis in large]
    for axis, (inter, intra) in NESTED.items():
        if {inter, intra} <= {*names}:  # both, one after the other, are the axis
            names = [axis if name == inter else name for name in names if name != intra]
    return tuple(names)


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


# [Note: groups outlive a mesh]
# A run that moves has one mesh after another on the same ranks. A group cannot be destroyed with its mesh: whoever still has
# a tensor of that mesh has its group, and an NCCL communicator is destroyed by all of its ranks together. So all meshes that
# come of one another share a pool, and a mesh takes from it the groups that it would make alike: their number is bounded by
# the different partitions that were ever asked for, however often a run moves to and fro. By the whole partition, not by this
# rank's part of it: so all ranks decide alike which groups are missing. Two axes of one mesh never share a group: messages
# are told apart by it.


@dataclass(frozen=True)
class MeshGroups:
    """This rank's groups of a mesh. all: of all its ranks. pool: of all meshes of these ranks, by their partition."""

    spec: MeshSpec
    ranks: tuple[int, ...]
    all: dist.ProcessGroup
    by_axes: dict[Axes, dist.ProcessGroup]
    timeout: timedelta
    pool: dict[Partition, list[dist.ProcessGroup]] = field(default_factory=dict)

    def of(self, *axes: str) -> dist.ProcessGroup:
        return self.by_axes.get(group_axes(self.spec, *axes), self.all)

    def make(self, wanted: Iterable[Axes]) -> list[dist.ProcessGroup]:
        """Make those that are not there; returns them. A collective of all ranks of the mesh, and of no others.

        See [Note: groups outlive a mesh].
        """
        missing: list[Axes] = []
        for key in _missing(self.spec, wanted, self.by_axes):
            used = [group.group_name for group in self.by_axes.values()]
            pooled = self.pool.get(self._partition(key), [])
            group = next((group for group in pooled if group.group_name not in used), None)
            if group is None:
                missing.append(key)
            else:
                self._take(key, group)
        made = _torch.split(self.all, [self._partition(key) for key in missing], timeout=self.timeout)
        groups = [group for group in made if group is not None]
        for key, group in zip(missing, groups, strict=True):
            self.pool.setdefault(self._partition(key), []).append(group)
            self._take(key, group)
        return groups

    def _partition(self, key: Axes) -> Partition:
        return tuple(map(tuple, partition(self.spec, self.ranks, key)))

    def _take(self, key: Axes, group: dist.ProcessGroup) -> None:
        self.by_axes[key] = group
        name_group(group.group_name, "_".join(key))

    def of_spec(self, spec: MeshSpec) -> tuple[MeshGroups, list[dist.ProcessGroup]]:
        """(the groups of a mesh of the same ranks with other axes, those of them that are new). Collective as `make`."""
        groups = MeshGroups(spec, self.ranks, self.all, {}, self.timeout, self.pool)
        name_group(self.all.group_name, "_".join(group_axes(spec, *DENSE_AXES)))
        return groups, groups.make(made_at_once(spec))

    def of_part(self, spec: MeshSpec, axes: Axes) -> MeshGroups:
        """The groups of a mesh with this spec on the part of the ranks that differ in these axes alone. Collective as `make`,
        of which every part makes its own."""
        parts = self._partition(axes)
        (part,) = _torch.split(self.all, [parts], timeout=self.timeout)
        assert part is not None
        ranks = tuple(dist.get_process_group_ranks(part))
        groups = MeshGroups(spec, ranks, part, {}, self.timeout)
        name_group(part.group_name, "_".join(axes))
        groups.make(made_at_once(spec))
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
