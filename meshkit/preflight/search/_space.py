"""The space of a search: which values each choice of a strategy may have, and all strategies of a world in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.preflight.forecast import Batch
from meshkit.strategy import RecomputeMode, Scheme, Strategy

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")


@dataclass(frozen=True, kw_only=True)
class Space:
    """Values that a search may choose from. Axes, with None: pp and the dp axes any divisor of the world, tp those inside of
    a node, ep any divisor up to the number of experts; cp and etp are 1 unless they are given.

    zero: None is the strategy's default. microbatches: None is every divisor of a
    rank's rows that leaves a microbatch at most `rows` of them. balance: also the partition of
    blocks that makes the slowest stage as fast as can be, beside the one by parameters.
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
    zero: tuple[int | None, ...] = (None, 1)
    sequence: tuple[bool, ...] = (False, True)
    recompute: tuple[RecomputeMode, ...] = ("none", "selective", "full")
    scheme: tuple[Scheme, ...] = ("auto",)
    microbatches: tuple[int, ...] | None = None
    rows: int = 8
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
            changes |= {axis: (size,) for axis, size in vars(fixed.mesh).items() if size not in (1, -1)}
        plain = Strategy()
        chosen: dict[str, tuple[object, object]] = {
            "schedule": (fixed.pipeline.schedule, plain.pipeline.schedule),
            "zero": (fixed.zero, plain.zero),
            "sequence": (fixed.sequence, plain.sequence),
            "recompute": (fixed.memory.recompute, plain.memory.recompute),
            "scheme": (fixed.context.scheme, plain.context.scheme),
            "microbatches": (fixed.microbatches, plain.microbatches),
        }
        changes |= {name: (given,) for name, (given, default) in chosen.items() if given != default}
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

    def groups(self, batch: Batch, world: int, fixed: Strategy, *, node: int, experts: int) -> Iterator[Group]:
        """Those that differ: what an axis of one rank would ignore is asked for in one way only."""
        for meshes in self.meshes(world, node=node, experts=experts):
            mesh, rows = meshes[0], batch.rows(meshes[0])
            if mesh.dp_replicate * mesh.dp_shard > batch.sequences:
                continue  # ranks without a row
            counts = self.microbatches or [count for count in divisors(rows) if rows // count <= self.rows]
            sequences = self.sequence if mesh.tp > 1 else self.sequence[:1]
            schedules = self.schedule if mesh.pp > 1 else self.schedule[:1]
            schemes = self.scheme if mesh.cp > 1 else self.scheme[:1]
            pipelines = [
                replace(fixed.pipeline, schedule=each) if mesh.pp > 1 else fixed.pipeline for each in schedules
            ]
            contexts = [replace(fixed.context, scheme=each) for each in schemes]
            memories = [replace(fixed.memory, recompute=each) for each in self.recompute]
            for zero in self.zero if mesh.pp == 1 else self.zero[:1]:
                has_stages = [each for each in meshes if zero == self.zero[0] or each.dp_shard * each.cp > 1]
                if not has_stages:
                    continue
                for count, sequence, pipeline, context, memory in product(
                    counts, sequences, pipelines, contexts, memories
                ):
                    if count <= rows:
                        first = replace(
                            fixed,
                            mesh=has_stages[0],
                            microbatches=count,
                            sequence=sequence,
                            zero=zero,
                            pipeline=pipeline,
                            context=context,
                            memory=memory,
                        )
                        yield Group(first, tuple(has_stages))

    def strategies(self, batch: Batch, world: int, fixed: Strategy, *, node: int, experts: int) -> Iterator[Strategy]:
        """All of the groups."""
        for group in self.groups(batch, world, fixed, node=node, experts=experts):
            yield from group.strategies


@dataclass(frozen=True)
class Group:
    """Strategies that differ from the first in their mesh alone, and there in how data ranks are split alone."""

    first: Strategy
    meshes: tuple[MeshSpec, ...]

    def __len__(self) -> int:
        return len(self.meshes)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Most shards first."""
        return (self.first, *(replace(self.first, mesh=mesh) for mesh in self.meshes[1:]))


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
