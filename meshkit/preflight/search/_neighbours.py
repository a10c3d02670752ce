"""Neighbours of the best strategy: each has one choice changed, and says why it loses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshkit.errors import MeshkitError
from meshkit.preflight._flags import row_name
from meshkit.preflight.search._pricing import Pricing
from meshkit.preflight.search._result import Neighbour, Tried, reason_of, why_it_loses
from meshkit.preflight.search._space import Space, offloaded
from meshkit.strategy import Strategy


def neighbours(
    pricing: Pricing,
    best: Tried,
    fixed: Strategy,
    space: Space,
    sizes: Mapping[str, Sequence[int]],
    device_bytes: int | None,
    *,
    node: int,
    ended: bool,
) -> list[Neighbour]:
    """Those of the space. sizes: of each axis, as `Space.sizes` returns them. node: ranks of one. ended: only those that need
    no tracing.
    """
    found = []
    for change, strategy in _changed(best.strategy, fixed, space, sizes, node):
        try:
            if ended and not pricing.is_traced(strategy):
                continue
            other = pricing.tried(strategy)
        except MeshkitError as error:
            found.append(Neighbour(change, f"refused: {reason_of(error)}"))
            continue
        found.append(Neighbour(change, why_it_loses(best, other, device_bytes)))
    return found


def _changed(
    best: Strategy, fixed: Strategy, space: Space, sizes: Mapping[str, Sequence[int]], node: int
) -> list[tuple[str, Strategy]]:
    spec = replace(best.mesh_for(), placement=())  # each neighbour finds its own
    best = replace(best, mesh=spec)
    flat = replace(spec, dp_intra=1)
    changed: list[tuple[str, Strategy]] = []
    plain = replace(best, pipeline=replace(best.pipeline, stages=None))
    for axis in ("tp", "pp", "cp"):
        for size in (getattr(spec, axis) // 2, getattr(spec, axis) * 2):
            shards, rest = divmod(spec.dp_shard * getattr(spec, axis), size or 1)
            if size in sizes[axis] and not rest and shards:
                mesh = replace(flat, **{axis: size, "dp_shard": shards})
                changed += [
                    (f"{axis}={size}", replace(plain, mesh=each)) for each in space.nested(mesh, best.data, node=node)
                ]
    count = best.microbatches or 1
    for parts in (count // 2, count * 2):
        if parts and (space.microbatches is None or parts in space.microbatches):
            changed.append((f"microbatches={parts}", replace(best, microbatches=parts)))
    for mode in space.recompute:
        other = replace(best, memory=replace(best.memory, recompute=mode), overrides=fixed.overrides)
        if other != best:
            changed.append((f"recompute={mode}", other))
    for offload in space.offload:
        memory = replace(best.memory, optimizer=offloaded(best.memory.optimizer, offload))
        if memory != best.memory:
            where = "the host" if offload else "the device"
            changed.append((f"optimizer on {where}", replace(best, memory=memory)))
    for activations in space.activations:
        if activations != best.memory.offload:
            where = "the device" if activations is None else "a disk" if activations.to == "disk" else "the host"
            memory = replace(best.memory, offload=activations)
            changed.append((f"activations on {where}", replace(best, memory=memory)))
    for scheme in space.scheme if spec.cp > 1 else ():
        if scheme != best.context.scheme:
            changed.append((f"scheme={scheme}", replace(best, context=replace(best.context, scheme=scheme))))
    if spec.tp > 1 and len(space.sequence) > 1:
        changed.append((f"sequence={not best.sequence}", replace(best, sequence=not best.sequence)))
    if spec.pp > 1:
        for name in space.schedule:
            if name != best.pipeline.schedule:
                changed.append((f"schedule={name}", replace(plain, pipeline=replace(plain.pipeline, schedule=name))))
    for data, zero, meshes in space.rows_of([flat], best, node=node):
        if (data, zero) != (best.data, best.zero):
            other = replace(best, data=data, zero=zero, mesh=meshes[0])
            changed.append((row_name(other), other))
    return changed
