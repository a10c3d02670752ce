"""A strategy as the flags of a recipe, for what searches print."""

from __future__ import annotations

from collections import Counter

from meshkit.mesh import MeshSpec
from meshkit.parallel.shardings import shardings_of
from meshkit.strategy import ActivationOffload, Strategy


def flags_of(strategy: Strategy) -> str:
    """As a recipe takes them."""
    mesh = strategy.mesh
    assert isinstance(mesh, MeshSpec)
    recompute = strategy.memory.recompute
    parts = [
        f'--mesh "{mesh.text or "dp_shard=1"}"',
        f"--microbatches {strategy.microbatches or 1}",
    ]
    if mesh.pp > 1:
        parts.append(f"--schedule {strategy.pipeline.schedule}")
    if strategy.zero is not None:
        parts.append(f"--zero {strategy.zero}")
    if mesh.tp > 1:
        parts.append("--sequence" if strategy.sequence else "--no-sequence")
    parts.append(f"--recompute {getattr(recompute, 'mode', recompute)}")
    if (offload := strategy.memory.offload) is not None:
        parts.append(f"--offload {offload.to}")
        plain = ActivationOffload(to=offload.to)
        changed = [f"{key} {value}" for key, value in vars(offload).items() if value != getattr(plain, key)]
        parts += [f"({', '.join(changed)})"] if changed else []
    if strategy.memory.optimizer.offload is not None:
        parts.append("--optimizer-offload")
    if mesh.cp > 1:
        parts.append(f"(scheme {strategy.context.scheme})")
    if strategy.overrides:
        modes = Counter(str(each.recompute) for each in strategy.overrides.values() if each.recompute is not None)
        parts.append(f"({', '.join(f'{mode} in {count} blocks' for mode, count in modes.items())})")
    if strategy.data.shards:
        parts.append(f"({row_name(strategy)})")
    if strategy.pipeline.stages is not None:
        parts.append(f"(stages {','.join(map(str, strategy.pipeline.stages))})")
    return " ".join(parts)


def row_name(strategy: Strategy) -> str:
    """The row of shardings, as "zero=1" or "shardings node-all-all": of parameters, gradients and states."""
    if not strategy.data.shards:
        return f"zero={strategy.zero}"
    row = shardings_of(strategy, strategy.mesh_for())
    return f"shardings {row.parameters}-{row.gradients}-{row.states}"
