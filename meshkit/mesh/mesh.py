"""The device mesh (topology): the axes of a run, their sizes, and the ranks that form each process group.

A mesh is on all ranks of the world or on a part of them, and has two views of its ranks. The dense view is
`pp × dp_replicate × dp_shard × cp × tp`; the expert view is `pp × dp_replicate × edp × ep × etp`. `tp` varies fastest, so its
groups are on the fastest links. Axes of size 1 always exist.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import pairwise
from math import lcm
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core import _torch
from meshkit.errors import MeshError
from meshkit.mesh.agreement import Agreement
from meshkit.mesh.groups import EXPERTS, SHARD, TOKENS, MeshGroups, group_axes, make_groups
from meshkit.mesh.host import HostRanks, host_ranks
from meshkit.mesh.ranges import ranges_in_words
from meshkit.mesh.spec import AXIS_NAMES, DENSE_AXES, EXPERT_AXES, NESTED, MeshSpec, no_axis
from meshkit.mesh.use_once import use_once
from meshkit.mesh.world import launcher_rank, start_world

Value = TypeVar("Value")
_NESTED = [part for parts in NESTED.values() for part in parts]


@dataclass(frozen=True)
class Mesh:
    """Ranks of this world as a `DeviceMesh`, with the combinations of axes that several blocks use.

    `mesh["tp"]` and `mesh["dp_replicate", "dp_shard"]` are plain DeviceMeshes, ready for any PyTorch API.
    Every rank of the world has an object for every mesh. On ranks outside of the mesh `here` is False, `spec` and `ranks` can
    be read, and all else raises.
    """

    spec: MeshSpec
    ranks: tuple[int, ...]
    """ranks of the world, increasing; their index here is their rank of the mesh"""
    members: MeshGroups | None
    """its process groups; None on a rank outside"""
    dense: DeviceMesh
    data: DeviceMesh  # what fully_shard shards over: (dp_replicate, dp_shard*cp), or 1-D without replicas
    tokens: DeviceMesh  # 1-D: every rank that holds different tokens
    # A cache, by axes: DeviceMesh takes a millisecond to slice itself, and a step of generation asks three times.
    _slices: dict[str | tuple[str, ...], DeviceMesh] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        if (cached := self._slices.get(axes)) is not None:
            return cached
        names = (axes,) if isinstance(axes, str) else axes
        for name in names:
            if name not in DENSE_AXES and name not in EXPERT_AXES and name not in _NESTED:
                near = difflib.get_close_matches(name, DENSE_AXES + EXPERT_AXES, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise MeshError(f"mesh[{name!r}]: there is no such axis.{hint} The axes are {', '.join(DENSE_AXES)}.")
        self.require_here(f"mesh[{', '.join(map(repr, names))}]")
        if any(name in _NESTED for name in names):
            axis_mesh = self.over(*names)
        else:
            axis_mesh = self.dense[axes] if all(name in DENSE_AXES for name in names) else self.expert[axes]
        return self._slices.setdefault(axes, axis_mesh)

    @property
    def here(self) -> bool:
        """Whether this rank is one of the mesh's."""
        return self.members is not None

    def require_here(self, what: str) -> None:
        """Raises: MeshError on a rank outside of the mesh. what: the call, for the error."""
        if not self.here:
            raise MeshError(
                f"{what}: this is rank {dist.get_rank()} of the world, and the mesh is on {ranges_in_words(self.ranks)}. Ask "
                "on those only: `if mesh.here:`."
            )

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks of the mesh."""
        self.require_here("mesh.group")
        assert self.members is not None
        return self.members.all

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Those of more than one rank that this rank is in, in the order in which they were first used."""
        self.require_here("mesh.groups")
        assert self.members is not None
        return [group for group in (self.members.all, *self.members.by_axes.values()) if group.size() > 1]

    @property
    def host(self) -> HostRanks:
        """All ranks of the mesh, for Python objects and without waiting for devices. The first use makes groups: a collective
        of all ranks of the mesh."""
        return host_ranks(self.group)

    @cached_property
    def agreement(self) -> Agreement:
        """What its ranks say that they do: calls in which they meet begin by comparing it."""
        return Agreement(self)

    @cached_property
    def expert(self) -> DeviceMesh:
        """The expert view. Where ep and etp are 1, which makes it the dense one with dp_shard x cp x tp as edp, the first use
        may make a group: a collective of all ranks of the mesh."""
        self.require_here("mesh.expert")
        assert self.members is not None
        use_once(self.members.make([(axis,) for axis in EXPERT_AXES]), self.device)
        return _device_mesh(self.device_type, self.spec, EXPERT_AXES, self.ranks, self.members)

    @cached_property
    def expert_ranks(self) -> DeviceMesh:
        """1-D, ep x etp: the ranks that share the experts of one copy."""
        self.require_here("mesh.expert_ranks")
        return _combine(self.expert, EXPERTS, self.members)

    @property
    def expert_data(self) -> DeviceMesh:
        """What fully_shard shards experts over: (dp_replicate, edp), or edp without replicas."""
        return self.expert["dp_replicate", "edp"] if self.spec.dp_replicate > 1 else self.expert["edp"]

    def over(self, *axes: str) -> DeviceMesh:
        """1-D: all ranks of these axes of one view, which lie one after the other; "dp_inter" and "dp_intra" are such too.

        The first use may make a group: a collective of all ranks of the mesh.
        Wire: then names over the mesh, and a number over the new group.
        """
        self.require_here("mesh.over")
        assert self.members is not None
        use_once(self.members.make([axes]), self.device)
        key = group_axes(self.spec, *axes)
        view = self.dense if {*self.spec.parts(*axes)} <= {*self.spec.parts(*DENSE_AXES)} else self.expert
        for axis, parts in NESTED.items():
            if {*parts} & {*(key or axes)}:
                use_once(self.members.make([(part,) for part in parts]), self.device)
                groups = [self.members.of(part) for part in parts]
                view = _torch.nested_mesh(view, axis, {part: getattr(self.spec, part) for part in parts}, groups)
        return _combine(view, key or (axes[0],), self.members)

    @property
    def shard(self) -> DeviceMesh:
        """1-D: the axis that fully_shard shards over, without replicas."""
        return self.data[self.data.mesh_dim_names[-1]] if self.data.mesh_dim_names else self.data

    @property
    def device_type(self) -> str:
        return self.dense.device_type

    @property
    def rank(self) -> int:
        """This rank's rank of the mesh: 0 is the mesh's first, whichever rank of the world that is."""
        return dist.get_rank(self.group)

    def is_first(self, *axes: str, view: tuple[str, ...] = DENSE_AXES) -> bool:
        """Whether this rank is the first of those that differ from it in these axes of a view alone."""
        sizes = self.spec.sizes(view)
        at = dict(zip(sizes, np.unravel_index(self.rank, [*sizes.values()]), strict=True))
        return all(at[axis] == 0 for axis in axes)

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of the global batch. Ranks that differ only in pp, cp or tp read the same part."""
        self.require_here("mesh.data_rank")
        return self.dense.get_local_rank("dp_replicate") * self.spec.dp_shard + self.dense.get_local_rank("dp_shard")

    @property
    def data_ranks(self) -> int:
        return self.spec.dp_replicate * self.spec.dp_shard

    @property
    def row_multiple(self) -> int:
        """The length of padded rows is a multiple of this, for sequence parallelism and for kernels."""
        # 8: matrix units multiply rows in multiples of it; others are padded by the kernel or run slowly.
        return lcm(8, self.spec.tp)

    @property
    def device(self) -> torch.device:
        return device_of(self.dense)

    def describe(self) -> str:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        return self.spec.describe(ranks_per_node=per_node, ranks=self.ranks)


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device on the mesh."""
    # DeviceMesh knows the type alone, and tensors on the CPU have no index.
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def gather_over_data(mesh: Mesh, value: Value) -> list[Value]:
    """The values of all data ranks, in their order, on every rank. A collective of all ranks.

    Wire: over the ranks with different tokens, an all-gather of objects.
    """
    if mesh.data_ranks == 1:
        return [value]
    pairs: list[Any] = [None] * mesh.tokens.size()
    dist.all_gather_object(pairs, (mesh.data_rank, value), group=mesh.tokens.get_group())
    by_rank = dict(pairs)  # ranks that differ in cp give the same value
    return [by_rank[rank] for rank in range(mesh.data_ranks)]


def init_mesh(
    spec: MeshSpec | str = "",
    *,
    ranks: Sequence[int] | None = None,
    device_type: str | None = None,
    timeout: timedelta | None = None,
    **sizes: Any,
) -> Mesh:
    """Build a mesh of this world: `init_mesh("dp_shard=-1 tp=2")` or `init_mesh(dp_shard=-1, tp=2)`.

    An empty spec means dp_shard=-1. Starts the process group from torchrun's environment when there is none yet, or a
    world of one rank when not launched by torchrun. `device_type` defaults to the accelerator, else the CPU.
    ranks: the part of the world that the mesh is on, for example `range(4, 8)`; None is all of it. Meshes may overlap. Models
    on meshes that do not overlap train at the same time. On ranks outside, `mesh.here` is False.
    A spec's placement is of the whole world, and for the call that starts it.
    timeout: how long any collective of any axis may take, after which a waiting rank raises. Default: 10 minutes for a new
    world; the world's own for one that was started before.
    Collective: every rank of the world must call it with the same arguments, ranks outside of `ranks` too.
    Wire: an all-gather of the arguments; names over the mesh, and a number over each of its groups, see [Note: each group is
    used when it is made].

    Raises: MeshError when the axes do not fit the world or the part; on every rank when ranks ask for different meshes.
    """
    for name in sizes.keys() - {*AXIS_NAMES, "placement"}:
        raise MeshError(f"init_mesh({name}={sizes[name]!r}): {no_axis(name, 'device_type', 'ranks', 'timeout')}")
    if sizes and spec:
        raise MeshError(f"init_mesh got both {spec!r} and {sizes}: give the mesh once.")
    if not isinstance(spec, MeshSpec | str | None):
        raise MeshError(f"init_mesh(spec={spec!r}): give a text, as 'dp_shard=2 tp=2', a MeshSpec, or sizes by name.")
    wanted = (
        spec if isinstance(spec, MeshSpec) else MeshSpec.parse(spec) if spec else MeshSpec(**sizes or {"dp_shard": -1})
    )
    if wanted.placement and ranks is not None:
        raise MeshError(
            f"init_mesh({_short(wanted)}, ranks=...): a placement is of the whole world. Give it to an init_mesh of all "
            "ranks first; meshes on parts then have its order."
        )
    device_type = device_type or _default_device_type()
    if not dist.is_initialized():
        start_world(device_type, timeout or timedelta(minutes=10), placement=wanted.placement)
    elif timeout is not None and ranks is None:
        _torch.set_timeout(_torch.world(), timeout)
    world = dist.get_world_size()
    part = range(world) if ranks is None else ranks
    # In this order: a rank that refused its own arguments first would leave the others in the gather.
    if world > 1 and not _torch.is_fake_group(_torch.world()):
        _refuse_different_calls(wanted, ranks)
        _refuse_another_placement(wanted)
    if ranks is not None:
        _refuse_ranks(part, world)
    resolved = wanted.resolve(len(part), part=ranks is not None)
    mesh = _mesh_of(resolved, part, make_groups(resolved, part, timeout), device_type)
    use_once([_torch.world()], mesh.device)
    if mesh.here:
        use_once(mesh.groups, mesh.device)
    return mesh


def change_axes(mesh: Mesh, spec: MeshSpec) -> Mesh:
    """A mesh of the same ranks with other axes; `mesh` stays as it is. See [Note: groups outlive a mesh].

    Collective: every rank of the mesh calls it with the same spec, and no others.
    Wire: for groups that no mesh of these ranks has had, as `init_mesh`; else nothing.
    Raises: MeshError when the axes do not fit the ranks.
    """
    mesh.require_here("change_axes")
    if spec.placement not in ((), mesh.spec.placement):
        raise MeshError(
            f"change_axes({_short(spec)}): the ranks sit where they were started, {_short(mesh.spec)}. Save, and start anew."
        )
    spec = dataclasses.replace(spec, placement=mesh.spec.placement)
    resolved = spec.resolve(len(mesh.ranks), part=len(mesh.ranks) < dist.get_world_size())
    if resolved == mesh.spec:
        return mesh
    assert mesh.members is not None
    groups, made = mesh.members.of_spec(resolved)
    changed = _mesh_of(resolved, mesh.ranks, groups, mesh.device_type)
    use_once(made, mesh.device)
    return changed


def replica_mesh(mesh: Mesh) -> Mesh:
    """The mesh of this rank's replica alone: all axes of `mesh` but dp_replicate, on the ranks that share its place there.

    A run on it sends nothing over dp_replicate, and its losses, norms, comparisons and checkpoints are the replica's own, as
    local updates need them (`meshkit.optim.outer`). `mesh` stays as it is; without replicas it is the result.
    Collective: every rank of the mesh calls it, and no others.
    Wire: as `init_mesh`.
    """
    mesh.require_here("replica_mesh")
    if mesh.spec.dp_replicate == 1:
        return mesh
    assert mesh.members is not None
    spec = dataclasses.replace(mesh.spec, dp_replicate=1, placement=())
    groups = mesh.members.of_part(spec, group_axes(mesh.spec, "pp", "dp_shard", "cp", "tp"))
    replica = _mesh_of(spec, groups.ranks, groups, mesh.device_type)
    use_once(replica.groups, replica.device)
    return replica


def _mesh_of(spec: MeshSpec, ranks: Sequence[int], groups: MeshGroups | None, device_type: str) -> Mesh:
    dense = _device_mesh(device_type, spec, DENSE_AXES, ranks, groups)
    shard = _combine(dense, SHARD, groups)
    data = shard
    if spec.dp_replicate > 1 and groups is not None:
        data = dense["dp_replicate", "dp_shard"]
        # HSDP takes two axes. The ranks of cp hold the same parameters, so shards go over them too: a flattened axis, which
        # slicing cannot join with another.
        if spec.cp > 1:
            data = _torch.concatenate_meshes([dense["dp_replicate"], shard])
    tokens = _combine(dense, TOKENS, groups) if spec.dp_replicate > 1 else shard
    return Mesh(spec=spec, ranks=tuple(ranks), members=groups, dense=dense, data=data, tokens=tokens)


def _device_mesh(
    device_type: str, spec: MeshSpec, axes: tuple[str, ...], ranks: Sequence[int], groups: MeshGroups | None
) -> DeviceMesh:
    """The mesh of these axes over `ranks`, with these groups; None on a rank outside."""
    # On the CPU by name: under `with torch.device("meta")` the grid would have no values.
    grid = torch.tensor(list(ranks), dtype=torch.int, device="cpu").reshape(tuple(spec.sizes(axes).values()))
    return _torch.mesh_of_groups(device_type, grid, axes, [groups.of(axis) for axis in axes] if groups else [])


def _refuse_different_calls(spec: MeshSpec, ranks: Sequence[int] | None) -> None:
    """Raises: MeshError where ranks ask for different meshes.

    Ranks make groups together, so without this a rank that asks for another mesh would leave the others waiting.
    """
    own = spec, None if ranks is None else list(ranks)
    calls: list[tuple[MeshSpec, list[int] | None]] = [own] * dist.get_world_size()
    dist.all_gather_object(calls, own)
    for rank, call in enumerate(calls):
        if call != calls[0]:
            first, other = (
                f"{_short(spec)} on {'all ranks' if on is None else ranges_in_words(on)}"
                for spec, on in (calls[0], call)
            )
            raise MeshError(
                f"init_mesh: rank 0 asks for {first}, rank {rank} for {other}. Every rank of the world makes every mesh, in "
                "the same order, those it is not on too."
            )


def _refuse_another_placement(spec: MeshSpec) -> None:
    """Raises: MeshError on all ranks where the world was started with its ranks in another order."""
    if not spec.placement:
        return
    seats = [0] * dist.get_world_size()
    dist.all_gather_object(seats, launcher_rank())
    if tuple(seats) != spec.placement:
        raise MeshError(
            f"init_mesh({_short(spec)}): the ranks of this world are {'-'.join(map(str, seats))} of the launcher's. Give the "
            "placement to the first init_mesh, which starts the world."
        )


def _refuse_ranks(ranks: Sequence[int], world: int) -> None:
    if not ranks or any(after <= before for before, after in pairwise(ranks)) or ranks[0] < 0 or ranks[-1] >= world:
        raise MeshError(
            f"init_mesh(ranks={ranks!r}): ranks are an increasing part of 0 to {world - 1}, and at least one. For example, "
            f"ranks=range(0, {max(1, world // 2)})."
        )


def _short(spec: MeshSpec) -> str:
    return spec.text or "tp=1"


def _combine(view: DeviceMesh, axes: tuple[str, ...], groups: MeshGroups | None) -> DeviceMesh:
    """One axis out of several of a view; one of its own where at most one of them is larger than 1. On ranks outside, the
    view itself."""
    if groups is None:
        return view
    large = tuple(axis for axis in axes if getattr(groups.spec, axis) > 1)
    if len(large) <= 1:
        return view[large[0] if large else axes[0]]
    return _torch.flatten_mesh(view[large], "_".join(large), groups.of(*axes))


def _default_device_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"
