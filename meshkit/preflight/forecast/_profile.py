"""Profiles (traced operations, without a device): what each distinct block computes, phase by phase, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from meshkit.cluster import Op
from meshkit.mesh import MeshSpec
from meshkit.parallel.pipeline import Schedule
from meshkit.preflight.explain import Hierarchical
from meshkit.preflight.forecast._update import FUSED, Update
from meshkit.strategy import ActivationOffload

Ops = tuple[tuple[Op, int], ...]
"""operators with how often each runs"""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The operators of one microbatch through one part of a model on one rank: a block, or a module around the blocks.

    launches: kernels by phase; of compiled blocks those that are left after fusion. moved_bytes: of its activations that
    leave the device in forward and come back in backward.
    """

    ops: Ops
    launches: Mapping[str, int]
    moved_bytes: int = 0

    @staticmethod
    def of(ops: Iterable[Op], launches: Counter[str]) -> Profile:
        return Profile(ops=tuple(Counter(ops).items()), launches=dict(launches))

    def flops(self, *phases: str) -> float:
        """As papers count them, without what recompute repeats unless that is asked for."""
        wanted = phases or ("forward", "backward", "weight")
        return sum(op.flops * count for op, count in self.ops if op.phase in wanted)


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """blocks: the profile of each block, by name; equal blocks share one. around: of the modules before, between and after
    the blocks, in the order of their calls; "" is what runs outside of all of them, as the loss. before: those that are
    called before the first block.
    """

    blocks: Mapping[str, Profile]
    around: Mapping[str, Profile]
    before: tuple[str, ...] = ()

    @cached_property
    def flops(self) -> float:
        """Of one microbatch on one rank, forward and backward."""
        return sum(profile.flops() for profile in (*self.blocks.values(), *self.around.values()))


@dataclass(frozen=True)
class Call:
    """Messages of one kind: axis, operation, bytes as `explain` counts them, phase, and how many calls.

    hierarchical: the axes of the two hops and their chunks, where it is a whole collective in place of its messages.
    """

    axis: str
    op: str
    size: int
    phase: str
    count: int
    hierarchical: Hierarchical | None = None

    @property
    def is_beside(self) -> bool:
        """A ring's of cp, which go on while attention computes with what has come."""
        return self.axis == "cp" and self.op == "send"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A block or a module around the blocks, as one rank runs it.

    calls: in each microbatch. data: of an FSDP unit, in each step: gathers of its parameters and reductions of its gradients.
    copied_bytes: read and written beside those, where FSDP copies out of and into their buffers, in the step. trained:
    elements of its parameters that this rank updates, after sharding. grad_bytes: of its gradients before they are reduced.
    is_block: whether stages are made of it.
    """

    name: str
    profile: Profile
    calls: tuple[Call, ...] = ()
    data: tuple[Call, ...] = ()
    copied_bytes: float = 0.0
    trained: int = 0
    grad_bytes: float = 0.0
    is_block: bool = False


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """One optimizer step without a cluster: what a forecast prices. A pure record; equal runs have equal ones.

    stages: the parts of each pipeline stage, in the order of their calls; one without pp. schedule: the pipeline's table;
    None without pp. crossing: bytes between a stage and the next, forward and backward. once: what a step sends beside its
    microbatches. flops: of the step over all ranks, as papers count them, attention's whole square. update: the optimizer's.
    offload: of activations. unpriced: what the step does besides, and no number here counts.
    """

    spec: MeshSpec
    microbatches: int
    tokens: int
    flops: float
    dtype: str
    stages: tuple[tuple[Part, ...], ...]
    schedule: Schedule | None
    crossing: tuple[tuple[int, int], ...]
    once: tuple[Call, ...]
    update: Update = FUSED
    offload: ActivationOffload | None = None
    unpriced: tuple[str, ...] = ()

    @property
    def passing(self) -> tuple[int, ...]:
        """Of each stage, how many microbatches pass it."""
        return (self.microbatches,) if self.schedule is None else self.schedule.passing
