"""The table of shardings: ZeRO-1, 2 and 3, HSDP, MiCS, hpZ, PaRO and three levels are its rows; the axes of each level.

A level is a number of axes of the data ranks, counted from the innermost, the ranks of a node: so it is always ranks that lie
one after the other, and what is sharded over a wider level is sharded over a narrower one first.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core import _torch
from meshkit.errors import PlanError
from meshkit.mesh import Mesh, MeshSpec
from meshkit.strategy import ZERO, DataPolicy, Level, Shardings, Strategy

_DENSE = ("dp_replicate", "dp_inter", "dp_intra", "cp")
_EXPERTS = ("dp_replicate", "edp_inter", "edp_intra")
_FIRST = {"none": None, "node": 2, "all": 1, "replicas": 0}  # the first axis of a level


def shardings_of(strategy: Strategy, spec: MeshSpec) -> Shardings:
    """The row of a run: the policy's, or that of the ZeRO stage, by default 3 and with pp 1.

    Raises: PlanError for a stage that does not exist, for both at once, and for what the mesh or pp has not.
    """
    zero, policy = strategy.zero, strategy.data
    if policy.is_hierarchical and spec.dp_intra == 1 and spec.dp_shard > 1:
        raise PlanError(f"DataPolicy(collectives='hierarchical'): {_no_nodes(spec)}")
    if zero is not None and policy.shards:
        raise PlanError(
            f"zero={zero} and {_given(policy)}: two places for one choice, since zero={zero} names such a row. Leave one "
            "away."
        )
    if policy.shards:
        states = policy.states or "all"
        others: Level = "none" if spec.pp > 1 else states
        row = Shardings(policy.parameters or others, policy.gradients or others, states)
        _refuse(row, policy, spec)
        return row
    if spec.pp > 1 and zero not in (None, 1):
        raise PlanError(
            f"zero={zero} with pp: parameters are gathered once a step and gradients reduced once, which is zero=1. Leave "
            "zero away, or give dp_shard the ranks of pp."
        )
    # Not `zero or ...`: 0, which other libraries give to plain replication, would silently shard everything.
    return zero_row((1 if spec.pp > 1 else 3) if zero is None else zero)


def zero_row(stage: int) -> Shardings:
    """The row that a ZeRO stage names. Raises: PlanError for a stage that does not exist."""
    if stage not in ZERO:
        raise PlanError(
            f"zero={stage}: the stages are 1 (optimizer state), 2 (and gradients), 3 (and parameters). To hold "
            "whole copies, use the axis dp_replicate."
        )
    return ZERO[stage]


def _given(policy: DataPolicy) -> str:
    names = ("parameters", "gradients", "states")
    told = ", ".join(f"{name}={value!r}" for name in names if (value := getattr(policy, name)) is not None)
    return f"DataPolicy({told})"


def _refuse(row: Shardings, policy: DataPolicy, spec: MeshSpec) -> None:
    levels = {"parameters": row.parameters, "gradients": row.gradients, "states": row.states}
    for name, level in levels.items():
        if level == "node" and spec.dp_intra == 1 and spec.dp_shard > 1:
            raise PlanError(f"DataPolicy({name}='node'): {_no_nodes(spec)}")
    if spec.pp > 1 and (row.frees_parameters or row.reduces_every_microbatch):
        raise PlanError(
            f"{_given(policy)} with pp: parameters are gathered once a step and gradients reduced once, so both are 'none'. "
            "Leave them away, or give dp_shard the ranks of pp."
        )
    if policy.reduce is not None and row.gradients not in ("none", row.states):
        raise PlanError(
            f"DataPolicy(reduce={policy.reduce!r}) with gradients={row.gradients!r}, states={row.states!r}: rounded "
            f"gradients are reduced in one hop, and these take two. Use gradients={row.states!r}, or reduce=None."
        )


def _no_nodes(spec: MeshSpec) -> str:
    nodes = f"{spec.dp_shard // 2}x2" if spec.dp_shard % 2 == 0 else f"1x{spec.dp_shard}"
    return f"this mesh tells no nodes apart. Say how many ranks of dp_shard a node has, as dp_shard={nodes} does."


def axes_between(inner: Level, outer: Level, *, experts: bool = False) -> tuple[str, ...]:
    """The axes over which something is sharded further when it goes from the inner level to the outer one."""
    axes = _EXPERTS if experts else _DENSE
    first, end = _FIRST[outer], _FIRST[inner]
    return () if first is None else axes[first:end]


def ranks_between(spec: MeshSpec, inner: Level, outer: Level, *, experts: bool = False) -> int:
    """Ranks of those axes together; from "none" to a level, over how many something of that level is sharded."""
    return prod(getattr(spec, axis) for axis in axes_between(inner, outer, experts=experts))


def spread_of(row: Shardings, spec: MeshSpec) -> tuple[int, ...]:
    """Over how many ranks parameters, gradients and states are sharded, and those of experts: rows in which all of them are
    equal are one row on this mesh.
    """
    levels = (row.parameters, row.gradients, row.states)
    views = (False, True) if spec.ep * spec.etp > 1 else (False,)
    return tuple(ranks_between(spec, "none", level, experts=experts) for experts in views for level in levels)


def hops_between(spec: MeshSpec, level: Level, states: Level, *, experts: bool = False) -> int:
    """Ranks of the outer hop of what lies between "none" and states; 1 where there is one hop."""
    return 1 if level == "none" else ranks_between(spec, level, states, experts=experts)


def hierarchical_axes(
    row: Shardings, spec: MeshSpec, *, experts: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The axes (inside of a node, across nodes) of what goes over the ranks of states in one hop; None where they are not
    ranks of several nodes, or one of each."""
    if row.states == "node":
        return None
    inside = axes_between("none", "node", experts=experts)
    across = axes_between("node", row.states, experts=experts)
    several = all(prod(getattr(spec, axis) for axis in axes) > 1 for axes in (inside, across))
    return (inside, across) if several else None


def hierarchical_ranks(row: Shardings, spec: MeshSpec, *, experts: bool = False) -> tuple[int, int] | None:
    """The ranks of those axes: (in a node, nodes)."""
    axes = hierarchical_axes(row, spec, experts=experts)
    if axes is None:
        return None
    inside, across = (prod(getattr(spec, axis) for axis in each) for each in axes)
    return inside, across


def axes_outside(level: Level, *, experts: bool = False) -> tuple[str, ...]:
    """The data axes whose ranks hold the same parts of what is sharded over a level."""
    return (_EXPERTS if experts else _DENSE)[: _FIRST[level]]


@dataclass(frozen=True, kw_only=True)
class Hops:
    """The two groups of a gather, or of a reduction, in two hops. A rank of both together has the index outer x inner."""

    inner: ProcessGroup
    outer: ProcessGroup


@dataclass(frozen=True, kw_only=True)
class ShardMesh:
    """What FSDP shards over. mesh: one axis, or two: replicate x shard. gather: where whole parameters are gathered from
    copies that lie on fewer ranks than the shards; reduce: where gradients add up on fewer ranks. None: in one hop, which
    goes inside of nodes and across where there is `hierarchical`. by_nodes: whether the policy wanted that."""

    mesh: DeviceMesh
    gather: Hops | None = None
    reduce: Hops | None = None
    hierarchical: Hops | None = None
    by_nodes: bool = False


def shard_mesh(mesh: Mesh, row: Shardings, *, experts: bool = False, policy: DataPolicy | None = None) -> ShardMesh:
    """The groups of a row on this mesh. The first use may make some: a collective of all ranks of the mesh.

    policy: whose collectives may be hierarchical.
    Wire: as `Mesh.over`.
    """
    if row.states == "all":
        data = mesh.expert_data if experts else mesh.data
    else:
        data = mesh.over(*axes_between("none", row.states, experts=experts))
        outside = mesh.over(*axes) if (axes := axes_outside(row.states, experts=experts)) else None
        if outside is not None and outside.size() > 1:
            data = _torch.concatenate_meshes([outside, data])

    def hops(level: Level) -> Hops | None:
        if level in ("none", row.states):
            return None
        outer = mesh.over(*axes_between(level, row.states, experts=experts)).get_group()
        inner = mesh.over(*axes_between("none", level, experts=experts)).get_group()
        # Of one rank there is only one hop; where it is the outer one, what adds up inside adds up on the rank itself.
        return Hops(inner=inner, outer=outer) if outer.size() > 1 else None

    nodes, by_nodes = None, policy is not None and policy.is_hierarchical
    if by_nodes and (found := hierarchical_axes(row, mesh.spec, experts=experts)) is not None:
        inside, across = found
        nodes = Hops(inner=mesh.over(*inside).get_group(), outer=mesh.over(*across).get_group())
    return ShardMesh(
        mesh=data, gather=hops(row.parameters), reduce=hops(row.gradients), hierarchical=nodes, by_nodes=by_nodes
    )
