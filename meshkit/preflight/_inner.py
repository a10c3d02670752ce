"""The inner mesh: the axes on which a rank computes what it computes on the whole mesh, for a step of a thin model."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from meshkit.mesh import MeshSpec
from meshkit.resolve import Resolved
from meshkit.strategy import BlockOverride, DataPolicy, OptimizerPolicy, PipelinePolicy, Strategy


def inner_mesh(spec: MeshSpec) -> MeshSpec:
    """The least mesh on which a rank computes what it does on this one, for one stage and one replica."""
    experts, dense = spec.ep * spec.etp, spec.cp * spec.tp
    return MeshSpec(dp_shard=experts // gcd(experts, dense), cp=spec.cp, tp=spec.tp, ep=spec.ep, etp=spec.etp)


def inner_strategy(resolved: Resolved, spec: MeshSpec, blocks: set[str]) -> Strategy:
    """The choices that change what a rank computes; each block is treated as it was resolved."""
    strategy, memory = resolved.strategy, resolved.memory
    precision = memory.precision if memory.precision is not None and memory.precision.fp8 is not None else None
    return replace(
        strategy,
        mesh=spec,
        memory=replace(memory, recompute="none", offload=None, optimizer=OptimizerPolicy(), precision=precision),
        zero=None,
        data=DataPolicy(),
        pipeline=PipelinePolicy(),
        microbatches=None,
        compile=False,
        overrides={
            name: BlockOverride(recompute=resolved.treatments[name].recompute)
            for name in resolved.blocks
            if name in blocks and resolved.treatments[name].recompute.mode != "none"
        },
    )
