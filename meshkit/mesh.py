"""Who: the axes of a run, their sizes, and the ranks that form each group.

One world of ranks is seen in two views. The dense view is `pp × dp_replicate × dp_shard × cp × tp`; the expert view of
the same ranks is `pp × dp_replicate × edp × ep × etp`. `tp` varies fastest, so its groups sit on the fastest links.
Axes of size 1 always exist.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshkit import _torch
from meshkit.errors import MeshError

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "etp")


@dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """Axis sizes. One dense axis may be -1: the ranks that are left.

    `MeshSpec(dp_shard=-1, tp=2).resolve(8)` has dp_shard=4.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for axis, size in dataclasses.asdict(self).items():
            if axis in ("ep", "etp") and size == -1:
                raise MeshError(f"mesh {axis}=-1: only {', '.join(DENSE_AXES)} can be -1. Give {axis} a size.")
            if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
                raise MeshError(
                    f"mesh {axis}={size!r}: an axis size is a whole number of at least 1, or -1 for the ranks that are "
                    "left."
                )
        free = [axis for axis in DENSE_AXES if getattr(self, axis) == -1]
        if len(free) > 1:
            raise MeshError(f"mesh {' '.join(f'{axis}=-1' for axis in free)}: only one axis can be -1. Fix the others.")

    @staticmethod
    def parse(text: str) -> MeshSpec:
        """`"dp_shard=2 tp=2"` to a spec. Axes may be separated by spaces or commas; axes not named have size 1."""
        sizes: dict[str, int] = {}
        names = [field.name for field in dataclasses.fields(MeshSpec)]
        for word in text.replace(",", " ").split():
            axis, equals, value = word.partition("=")
            if not equals:
                raise MeshError(f'mesh "{text}": {word!r} is not axis=size. Write, for example, "dp_shard=2 tp=2".')
            if axis not in names:
                near = difflib.get_close_matches(axis, names, n=1)
                hint = f"Did you mean {near[0]!r}? " if near else ""
                raise MeshError(f'mesh "{text}": there is no axis {axis!r}. {hint}The axes are {", ".join(names)}.')
            if axis in sizes:
                raise MeshError(f'mesh "{text}": axis {axis!r} is given twice. Keep one.')
            try:
                sizes[axis] = int(value)
            except ValueError:
                raise MeshError(f'mesh "{text}": the size of {axis!r} is {value!r}, not a whole number.') from None
        return MeshSpec(**sizes)

    @property
    def world_size(self) -> int:
        """Ranks this spec needs. Meaningful once no axis is -1."""
        return prod(getattr(self, axis) for axis in DENSE_AXES)

    @property
    def edp(self) -> int:
        """Data-parallel copies of each expert: what ep and etp leave of dp_shard × cp × tp."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    def sizes(self, axes: tuple[str, ...] = DENSE_AXES) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in axes}

    def resolve(self, world_size: int) -> MeshSpec:
        """This spec with -1 replaced and every size checked against the world.

        Raises: MeshError with the arithmetic when the axes do not multiply to `world_size`.
        """
        free = [axis for axis in DENSE_AXES if getattr(self, axis) == -1]
        fixed = prod(size for size in self.sizes().values() if size != -1)
        product = "*".join(f"{axis}={size}" for axis, size in self.sizes().items() if size not in (1, -1)) or "tp=1"
        if world_size % fixed:
            divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise MeshError(
                f"mesh {product} needs a multiple of {fixed} ranks, but the world has {world_size}. "
                f"Change --nproc-per-node, or make the product of the axes one of {divisors}."
            )
        if not free and fixed != world_size:
            raise MeshError(
                f"mesh {product} uses {fixed} of the {world_size} ranks. Start {fixed} ranks, or give one axis the size "
                f"-1 to take all that are left, for example dp_shard=-1."
            )
        spec = dataclasses.replace(self, **{free[0]: world_size // fixed}) if free else self
        fold, experts = spec.dp_shard * spec.cp * spec.tp, spec.ep * spec.etp
        if fold % experts:
            raise MeshError(
                f"mesh ep={spec.ep} etp={spec.etp} needs ep*etp={experts} to divide "
                f"dp_shard*cp*tp={spec.dp_shard}*{spec.cp}*{spec.tp}={fold}. Choose ep and etp from the divisors of {fold}."
            )
        return spec

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks of every group of one axis, in order of the first rank. Needs no process group."""
        axes = DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES
        sizes = [getattr(self, name) for name in axes]
        grid = torch.arange(prod(sizes)).reshape(sizes)
        rows = grid.movedim(axes.index(axis), -1).reshape(-1, sizes[axes.index(axis)])
        return sorted(rows.tolist())

    def describe(self, *, ranks_per_node: int = 8) -> str:
        """One line per axis: its groups of ranks and whether they stay inside a node.

        Needs no process group: describe a mesh of 1024 ranks on a laptop.
        """
        lines = [f"{self.world_size} ranks, {ranks_per_node} per node"]
        for title, axes in (("dense", DENSE_AXES), ("expert", EXPERT_AXES)):
            for axis in axes:
                size = getattr(self, axis)
                if title == "expert" and axis in DENSE_AXES:
                    continue  # pp and dp_replicate are the same groups in both views
                groups = self.groups(axis)
                nodes = max(len({rank // ranks_per_node for rank in group}) for group in groups)
                link = "-" if size == 1 else "intra-node" if nodes == 1 else f"inter-node ({nodes} nodes a group)"
                shown = " ".join(str(group) for group in groups[:4]) + (
                    f" ... {len(groups)} groups" * (len(groups) > 4)
                )
                lines.append(f"  {title:6} {axis:12} {size:>4}  {link:28} {shown if size > 1 else ''}".rstrip())
        return "\n".join(lines)


@dataclass(frozen=True)
class Mesh:
    """The ranks of this world as a `DeviceMesh`, with the axes that several blocks share already combined.

    `mesh["tp"]` and `mesh["dp_replicate", "dp_shard"]` are plain DeviceMeshes, ready for any PyTorch API.
    """

    spec: MeshSpec
    dense: DeviceMesh
    data: DeviceMesh  # what fully_shard shards over: (dp_replicate, dp_shard*cp), or 1-D without replicas
    tokens: DeviceMesh  # 1-D: every rank that holds different tokens

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        names = (axes,) if isinstance(axes, str) else axes
        for name in names:
            if name not in DENSE_AXES and name not in EXPERT_AXES:
                near = difflib.get_close_matches(name, DENSE_AXES + EXPERT_AXES, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise MeshError(f"mesh[{name!r}]: there is no such axis.{hint} The axes are {', '.join(DENSE_AXES)}.")
        return self.dense[axes] if all(name in DENSE_AXES for name in names) else self.expert[axes]

    @cached_property
    def expert(self) -> DeviceMesh:
        """The expert view. Built on first use, which is a collective: every rank must ask."""
        sizes = tuple(self.spec.sizes(EXPERT_AXES).values())
        mesh = init_device_mesh(self.device_type, sizes, mesh_dim_names=EXPERT_AXES)
        _take_timeout(mesh)
        return mesh

    @cached_property
    def expert_ranks(self) -> DeviceMesh:
        """1-D, ep x etp: the ranks that share the experts of one copy. A collective on first use."""
        mesh = _combine(self.expert, ("ep", "etp"), self.spec)
        _take_timeout(mesh)
        return mesh

    @property
    def expert_data(self) -> DeviceMesh:
        """What fully_shard shards experts over: (dp_replicate, edp), or edp without replicas."""
        return self.expert["dp_replicate", "edp"] if self.spec.dp_replicate > 1 else self.expert["edp"]

    @property
    def shard(self) -> DeviceMesh:
        """1-D: what fully_shard shards over, without replicas."""
        return self.data[self.data.mesh_dim_names[-1]] if self.data.mesh_dim_names else self.data

    @property
    def device_type(self) -> str:
        return self.dense.device_type

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def data_rank(self) -> int:
        """Which part of the global batch this rank reads: ranks that differ only in tp (or pp) read the same."""
        return self.dense.get_local_rank("dp_replicate") * self.spec.dp_shard + self.dense.get_local_rank("dp_shard")

    @property
    def data_ranks(self) -> int:
        return self.spec.dp_replicate * self.spec.dp_shard

    @property
    def device(self) -> torch.device:
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.accelerator.current_device_index())

    def describe(self) -> str:
        return self.spec.describe(ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", self.spec.world_size)))


def init_mesh(
    spec: MeshSpec | str = "",
    *,
    device_type: str | None = None,
    timeout: timedelta | None = None,
    **sizes: int,
) -> Mesh:
    """Build the mesh of this world: `init_mesh("dp_shard=-1 tp=2")` or `init_mesh(dp_shard=-1, tp=2)`.

    An empty spec means dp_shard=-1. Starts the process group from torchrun's environment when there is none yet, or a
    world of one rank when not launched by torchrun. `device_type` defaults to the accelerator, else the CPU.
    timeout: how long any collective of any axis may take, after which a waiting rank raises; default 10 minutes for a new
    world, and for one that is there already its own.
    Collective: every rank must call it with the same spec.

    Raises: MeshError when the axes do not fit the world.
    """
    if sizes and spec:
        raise MeshError(f"init_mesh got both {spec!r} and {sizes}: give the mesh once.")
    wanted = (
        spec if isinstance(spec, MeshSpec) else MeshSpec.parse(spec) if spec else MeshSpec(**sizes or {"dp_shard": -1})
    )
    device_type = device_type or _default_device_type()
    if not dist.is_initialized():
        _init_process_group(device_type, timeout or timedelta(minutes=10))
    elif timeout is not None:
        _torch.set_timeout(_world(), timeout)
    resolved = wanted.resolve(dist.get_world_size())
    dense = init_device_mesh(device_type, tuple(resolved.sizes().values()), mesh_dim_names=DENSE_AXES)
    shard = _combine(dense, ("dp_shard", "cp"), resolved)
    data = dense["dp_replicate", "dp_shard"] if resolved.dp_replicate > 1 else shard
    if resolved.dp_replicate > 1 and resolved.cp > 1:
        data = _torch.concatenate_meshes([dense["dp_replicate"], shard])
    tokens = _combine(dense, ("dp_replicate", "dp_shard", "cp"), resolved)
    for mesh in (dense, data, tokens):
        _take_timeout(mesh)
    return Mesh(spec=resolved, dense=dense, data=data, tokens=tokens)


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process believes to be one rank of a world of any size, whose collectives send nothing.

    `init_mesh(..., device_type="cpu")` and what follows work as ever, and what comes out of a collective has the right
    shape and no meaning. Afterwards there is no process group, as before.
    Raises: MeshError where there is a world already, and for a rank that it would not have.
    """
    if dist.is_initialized():
        raise MeshError(
            f"fake_world({world_size}): this process is in a world of {dist.get_world_size()} ranks already. Call it before "
            "init_mesh, or in a process of its own."
        )
    if not 0 <= rank < world_size:
        raise MeshError(f"fake_world({world_size}): there is no rank {rank}. The ranks are 0 to {world_size - 1}.")
    excepthook = sys.excepthook  # init_process_group puts one in front that names the rank
    _torch.start_fake_world(world_size, rank)
    try:
        yield
    finally:
        sys.excepthook = excepthook
        dist.destroy_process_group()
        _torch.forget_shardings()


def _take_timeout(mesh: DeviceMesh) -> None:
    """DeviceMesh gives its groups the backend's default timeout: give them the world's."""
    for group in mesh.get_all_groups():
        _torch.set_timeout(group, _torch.timeout_of(_world()))


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


@contextmanager
def main_rank_first() -> Iterator[None]:
    """Rank 0 runs the block while the others wait, then they run it: what it builds, they find. A collective."""
    if dist.get_rank() > 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


def _combine(dense: DeviceMesh, axes: tuple[str, ...], spec: MeshSpec) -> DeviceMesh:
    """One axis out of several; no new group when at most one of them is larger than 1."""
    large = tuple(axis for axis in axes if getattr(spec, axis) > 1)
    if len(large) <= 1:
        return dense[large[0] if large else axes[0]]
    return _torch.flatten_mesh(dense[large], "_".join(large))


def _default_device_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def _init_process_group(device_type: str, timeout: timedelta) -> None:
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else None if device_type != "cpu" else "gloo"
    if device_type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_torchelastic_launched() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
