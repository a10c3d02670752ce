"""Profiling a model: run a step of its thin copy in a fake world on fake tensors, and note what every part computes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from meshkit._parallelize import execute
from meshkit.errors import MeshkitError
from meshkit.mask import Mask
from meshkit.preflight._arguments import full_coordinate
from meshkit.preflight._first_step import after_first
from meshkit.preflight._inner import inner_mesh, inner_strategy
from meshkit.preflight._moved import watch_offload
from meshkit.preflight._thin import kinds_of_blocks, step_program
from meshkit.preflight.estimate import Kernels, fake_mesh
from meshkit.preflight.forecast._profile import ModelProfile, Profile
from meshkit.preflight.forecast._trace import OpTrace
from meshkit.resolve import Resolved, resolve
from meshkit.step import Loss, next_token_loss

NOTHING = Profile(ops=(), launches={})


def profile_model(
    resolved: Resolved,
    *,
    rows: int,
    seq_len: int,
    mask: Mask | Sequence[Mask] | None = None,
    loss: Loss = next_token_loss,
    kernels: Kernels = "cuda",
) -> ModelProfile:
    """What one rank computes for one microbatch of [rows, seq_len], before cp splits it.

    Each distinct block is traced once, by a step of a copy that has no other. It runs on the axes that split an operator: cp,
    tp, ep and etp; pipeline stages, ZeRO and replicas compute the same operators on other ranks.
    Raises: as `parallelize` and `estimate` do.
    """
    model = resolved.program.model
    kinds = kinds_of_blocks(model, resolved.blocks, resolved.treatments)
    try:
        traced = _traced(kinds, resolved, rows, seq_len, mask, loss, kernels)
    except (MeshkitError, LookupError, RuntimeError):
        # A model that knows its blocks by their numbers, or a plan that does, needs all of them.
        kinds = {name: name for name in kinds}
        traced = _traced(kinds, resolved, rows, seq_len, mask, loss, kernels)
    profiles, called, moved = traced
    of_kinds = {
        kind: replace(profiles.get(kind, NOTHING), moved_bytes=moved.get(kind, 0))
        for kind in dict.fromkeys(kinds.values())
    }
    around = [name for name in dict.fromkeys(called) if name not in kinds]
    first = next((at for at, name in enumerate(called) if name in kinds), 0)
    return ModelProfile(
        blocks={name: of_kinds[kind] for name, kind in kinds.items()},
        around={name: profiles[name] for name in (*around, "") if name in profiles},
        before=tuple(dict.fromkeys(called[:first])),
    )


def _traced(
    kinds: Mapping[str, str],
    resolved: Resolved,
    rows: int,
    seq_len: int,
    mask: Mask | Sequence[Mask] | None,
    loss: Loss,
    kernels: Kernels,
) -> tuple[dict[str, Profile], list[str], Mapping[str, int]]:
    """(profiles by owner, modules in the order of their calls, bytes that each block moves off the device)."""
    spec, blocks = inner_mesh(resolved.spec), set(kinds.values())
    strategy = inner_strategy(resolved, spec, blocks)
    program = step_program(resolved, kinds, strategy)
    # The fullest rank of dp_shard, of which here are only as many as hold all experts.
    batch = {name: torch.zeros(rows, seq_len, dtype=torch.int64) for name in ("input_ids", "labels")}
    model = copy.deepcopy(program.model)
    with fake_mesh(spec, full_coordinate(spec, None), kernels=kernels) as mesh:
        inner = resolve(program, strategy, spec, device_type=mesh.device.type)
        run = execute(model, mesh, inner)
        run.trusts_losses = True
        owners = blocks | set(modules_around(run.model, blocks))
        fused = blocks if resolved.strategy.compile else ()

        def traced() -> OpTrace:
            with OpTrace(run.model, owners, fused=fused) as trace:
                run.forward_backward(batch, mask=mask, loss=loss, step=1)
            return trace

        trace = after_first(run.model, traced)
        # Only now: what was fetched would be read as something else than what a fused kernel has written.
        watched = watch_offload(run, resolved)
        if watched is not None:
            run.forward_backward(batch, mask=mask, loss=loss, step=2)
    return trace.profiles(), trace.called, {} if watched is None else watched.bytes


def modules_around(model: nn.Module, blocks: set[str]) -> list[str]:
    """The outermost modules that are no block, in none, and hold none."""
    around: list[str] = []
    for name, _ in model.named_modules():
        holds = any(f"{block}.".startswith(f"{name}.") or not name for block in blocks)
        inside = any(f"{name}.".startswith(f"{outer}.") for outer in (*blocks, *around))
        if name and not holds and not inside:
            around.append(name)
    return around
