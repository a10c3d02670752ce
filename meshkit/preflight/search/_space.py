"""The space of a search: which values each choice of a strategy may have, and all strategies of a world in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import combinations, product

from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.mesh.spec import AXIS_NAMES
from meshkit.parallel.shardings import shardings_of, spread_of
from meshkit.preflight.forecast import Batch
from meshkit.strategy import (
    ActivationOffload,
    DataPolicy,
    OptimizerOffload,
    OptimizerPolicy,
    RecomputeMode,
    Scheme,
    Strategy,
)

LIGHTEST: tuple[RecomputeMode, ...] = ("none", "activation", "selective", "full")
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
ROWS = (
    DataPolicy(),
    DataPolicy(parameters="node"),  # hpZ
    DataPolicy(parameters="node", gradients="node"),  # PaRO-IIG
    DataPolicy(parameters="none", gradients="node"),  # PaRO-NIG
)


@dataclass(frozen=True, kw_only=True)
class Space:
    """Values that a search may choose from. Axes, with None: pp and the dp axes any divisor of the world, tp those inside of
    a node, ep any divisor up to the number of experts; cp and etp are 1 unless they are given.

    zero: None is the strategy's default. data: rows of shardings beside those that zero names; of rows that hold
    everything over as many ranks on a mesh the first is taken. dp_intra: ranks of dp_shard in a node, where a row shards
    over nodes; None: as many as a node of the cluster has. microbatches: None is every divisor of a rank's rows that
    leaves a microbatch at most `rows` of them. offload: whether masters and moments lie on the host, and are updated
    there (`OptimizerOffload`); such a strategy's peak is traced, which takes seconds. activations: policies by which blocks'
    activations leave the device (`ActivationOffload`), and None, with which they stay. mix: of two modes of recompute also
    both, where memory is looked at, nothing is overridden and the lighter mode does not fit: the first blocks of each
    rank of pp have the heavier, as few as fit. balance: also the partition of blocks that makes the slowest stage as fast
    as can be, beside the one by parameters.
    Raises: PlanError for an empty choice.
    """

    pp: tuple[int, ...] | None = None
    dp_replicate: tuple[int, ...] | None = None
    dp_shard: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = (1,)
    tp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    etp: tuple[int, ...] | None = (1,)
    schedule: tuple[str, ...] = ("1f1b", "interleaved", "zb-h1", "zbv")
    dp_intra: tuple[int, ...] | None = None
    zero: tuple[int | None, ...] = (None, 1)
    data: tuple[DataPolicy, ...] = ROWS
    sequence: tuple[bool, ...] = (False, True)
    recompute: tuple[RecomputeMode, ...] = ("none", "selective", "full")
    scheme: tuple[Scheme, ...] = ("all_gather", "ring", "ulysses")
    microbatches: tuple[int, ...] | None = None
    offload: tuple[bool, ...] = (False,)
    activations: tuple[ActivationOffload | None, ...] = (None,)
    rows: int = 8
    mix: bool = False
    balance: bool = True

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, str) or not isinstance(value, Sequence | int | None) or value == ():
                raise PlanError(f"Space({each.name}={value!r}): give a tuple of the values to choose from.")

    def fixed_by(self, fixed: Strategy) -> Space:
        """Less what the strategy says already: its mesh's axes that are not 1, and choices that are not the default."""
        changes: dict[str, tuple[object, ...]] = {}
        if isinstance(fixed.mesh, MeshSpec):
            if fixed.mesh.placement:
                raise PlanError(
                    f"search(fixed=...): the mesh {fixed.mesh.text!r} has a placement, which is of one mesh. Leave it away: "
                    "on unlike ranks each strategy is placed."
                )
            changes |= {axis: (size,) for axis, size in fixed.mesh.sizes(AXIS_NAMES).items() if size not in (1, -1)}
        plain = Strategy()
        chosen: dict[str, tuple[object, object]] = {
            "schedule": (fixed.pipeline.schedule, plain.pipeline.schedule),
            "zero": (fixed.zero, plain.zero),
            "data": (fixed.data, plain.data),
            "sequence": (fixed.sequence, plain.sequence),
            "recompute": (fixed.memory.recompute, plain.memory.recompute),
            "microbatches": (fixed.microbatches, plain.microbatches),
            "activations": (fixed.memory.offload, plain.memory.offload),
        }
        changes |= {name: (given,) for name, (given, default) in chosen.items() if given != default}
        if fixed.memory.optimizer != plain.memory.optimizer:
            changes["offload"] = (fixed.memory.optimizer.offload is not None,)
        if fixed.context != plain.context:
            changes["scheme"] = (fixed.context.scheme,)
        if fixed.zero is not None:
            changes["data"] = (fixed.data,)
        return replace(self, **changes)  # type: ignore[arg-type]

    def sizes(self, world: int, *, node: int, experts: int) -> dict[str, Sequence[int]]:
        """Of each axis. node: ranks of one, for tp; experts: of a block of the model, 0 without."""
        every = divisors(world)
        default = {
            "tp": [size for size in every if size <= node],
            "ep": [size for size in every if size <= experts or size == 1],
        }
        return {axis: getattr(self, axis) or default.get(axis, every) for axis in AXES}

    def meshes(self, world: int, *, node: int, experts: int) -> Iterator[tuple[MeshSpec, ...]]:
        """All of the world; in one tuple those that differ in how data ranks are split, most shards first: they hold least.

        node, experts: as `sizes` takes them.
        """
        sizes = self.sizes(world, node=node, experts=experts)
        axes = [sizes[axis] for axis in ("pp", "cp", "tp", "ep", "etp")]
        for pp, cp, tp, ep, etp in product(*axes):
            data, rest = divmod(world, pp * cp * tp)
            if rest:
                continue
            alike = [
                MeshSpec(pp=pp, dp_replicate=replicas, dp_shard=data // replicas, cp=cp, tp=tp, ep=ep, etp=etp)
                for replicas in sorted(sizes["dp_replicate"])
                if data % replicas == 0 and data // replicas in sizes["dp_shard"]
            ]
            # Both views are of the same ranks.
            if fitting := tuple(mesh for mesh in alike if mesh.dp_shard * cp * tp % (ep * etp) == 0):
                yield fitting

    def nested(self, spec: MeshSpec, policy: DataPolicy, *, node: int) -> Iterator[MeshSpec]:
        """The mesh with nodes told apart, as often as there are sizes, where the policy shards over nodes; else once, with
        the first size if one is given.
        """
        has_nodes = "node" in (policy.parameters, policy.gradients, policy.states)
        sizes = self.dp_intra or (node // (spec.cp * spec.tp) if has_nodes else 1,)
        told = [
            replace(spec, dp_intra=size)
            for size in (sizes if has_nodes else sizes[:1])
            # A node has whole sets of experts.
            if size > 1 and spec.dp_shard % size == 0 and size * spec.cp * spec.tp % (spec.ep * spec.etp) == 0
        ]
        yield from told if has_nodes or told else [spec]

    def rows_of(
        self, meshes: Sequence[MeshSpec], fixed: Strategy, *, node: int
    ) -> list[tuple[DataPolicy, int | None, tuple[MeshSpec, ...]]]:
        """(policy, zero, meshes) of each row: those meshes that have it, and where no row before is the same.

        Where none has any, the first row, for which `resolve` says why.
        """
        every = [(each, zero) for each in self.data for zero in ((None,) if each.shards else self.zero)]
        found: list[tuple[DataPolicy, int | None, tuple[MeshSpec, ...]]] = []
        seen: set[object] = set()
        for policy, zero in every:
            chosen, fitting = replace(fixed, data=policy, zero=zero), []
            for mesh in meshes:
                for spec in self.nested(mesh, policy, node=node):
                    try:
                        row = shardings_of(chosen, spec)
                    except PlanError:
                        continue
                    key = mesh, policy.gather, policy.reduce, policy.feedback, spread_of(row, spec)
                    if key not in seen:
                        seen.add(key)
                        fitting.append(spec)
            if fitting:
                found.append((policy, zero, tuple(fitting)))
        return found or [(*every[0], tuple(meshes))]

    def groups(
        self, batch: Batch, world: int, fixed: Strategy, *, node: int, experts: int, mix: bool = False
    ) -> Iterator[Group]:
        """Those that differ: what an axis of one rank would ignore is asked for in one way only. mix: whether two modes of
        recompute may be mixed.
        """
        modes: list[tuple[RecomputeMode, RecomputeMode | None]] = [(mode, None) for mode in self.recompute]
        if mix and self.mix and not fixed.overrides:
            modes += combinations(sorted(self.recompute, key=LIGHTEST.index), 2)
        for meshes in self.meshes(world, node=node, experts=experts):
            mesh, rows = meshes[0], batch.rows(meshes[0])
            if mesh.dp_replicate * mesh.dp_shard > batch.sequences:
                continue  # ranks without a row
            counts = self.microbatches or [count for count in divisors(rows) if rows // count <= self.rows]
            sequences = self.sequence if mesh.tp > 1 else self.sequence[:1]
            schedules = self.schedule if mesh.pp > 1 else self.schedule[:1]
            pipelines = [
                replace(fixed.pipeline, schedule=each) if mesh.pp > 1 else fixed.pipeline for each in schedules
            ]
            contexts = [replace(fixed.context, scheme=each) for each in self.scheme] if mesh.cp > 1 else [fixed.context]
            memories = [
                (replace(fixed.memory, recompute=mode, offload=activations, optimizer=optimizer), heavier)
                for optimizer in map(partial(offloaded, fixed.memory.optimizer), self.offload)
                for activations in self.activations
                for mode, heavier in modes
            ]
            for data, zero, fitting in self.rows_of(meshes, fixed, node=node):
                for count, sequence, pipeline, context, (memory, heavier) in product(
                    counts, sequences, pipelines, contexts, memories
                ):
                    if count <= rows:
                        first = replace(
                            fixed,
                            mesh=fitting[0],
                            microbatches=count,
                            sequence=sequence,
                            zero=zero,
                            data=data,
                            pipeline=pipeline,
                            context=context,
                            memory=memory,
                        )
                        yield Group(first, fitting, heavier)

    def strategies(self, batch: Batch, world: int, fixed: Strategy, *, node: int, experts: int) -> Iterator[Strategy]:
        """All of the groups."""
        for group in self.groups(batch, world, fixed, node=node, experts=experts):
            yield from group.strategies


@dataclass(frozen=True)
class Group:
    """Strategies that differ from the first in their mesh alone, and there in how data ranks are split alone.

    heavier: recompute of the first blocks of each rank, of so many that it fits; None where all blocks are treated alike. A
    mixed strategy takes no less time than the first, and holds no less than `smallest`.
    """

    first: Strategy
    meshes: tuple[MeshSpec, ...]
    heavier: RecomputeMode | None = None

    def __len__(self) -> int:
        return len(self.meshes)

    @property
    def smallest(self) -> Strategy:
        """The first, with the heavier mode in all blocks."""
        if self.heavier is None:
            return self.first
        return replace(self.first, memory=replace(self.first.memory, recompute=self.heavier))

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Most shards first."""
        return (self.first, *(replace(self.first, mesh=mesh) for mesh in self.meshes[1:]))


def offloaded(policy: OptimizerPolicy, offload: bool) -> OptimizerPolicy:
    """The policy with its states on the host, or on the device; as it is where they are there already."""
    if offload == (policy.offload is not None):
        return policy
    return replace(policy, offload=OptimizerOffload() if offload else None)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
