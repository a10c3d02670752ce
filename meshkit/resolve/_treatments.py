"""What each block keeps for backward, and where: as a policy, a `Budget` or an override says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from meshkit.errors import PlanError
from meshkit.memory import Treatment, fp8_linears, may_move, treatments
from meshkit.memory.budget.choose import Choice
from meshkit.memory.budget.profile import choose_for_blocks
from meshkit.mesh import MeshSpec
from meshkit.parallel.pipeline import Cut
from meshkit.plan import match_table
from meshkit.program import Program
from meshkit.resolve._names import Names
from meshkit.strategy import BlockOverride, Budget, Fp8, MemoryPolicy, Recompute, Strategy


def choose(
    program: Program,
    strategy: Strategy,
    spec: MeshSpec,
    names: Names,
    *,
    fp8: Sequence[str],
    sequence: bool,
    compute: torch.dtype,
    device: str,
    cut: Cut | None,
) -> Sequence[Choice]:
    """What a `Budget` chooses, on each rank of pp; nothing without one."""
    if not isinstance(strategy.memory.recompute, Budget):
        return ()
    precision = strategy.memory.precision
    return choose_for_blocks(
        _priced(program, fp8, precision.fp8 if precision is not None else None),
        spec,
        plan=names.plan,
        memory=strategy.memory,
        blocks=names.blocks,
        sequence=sequence,
        compute=compute,
        device=device,
        cut=cut,
    )


def _priced(program: Program, fp8: Sequence[str], policy: Fp8 | None) -> torch.nn.Module:
    """The model whose blocks a `Budget` prices, with the linear layers that the run will have (fp8)."""
    if not fp8 or policy is None:
        return program.model
    # On a copy: resolve changes nothing, and `parallelize` changes the linears of the real model itself.
    copy = program.frozen().model
    fp8_linears(copy, linears=fp8, policy=policy)
    return copy


def treat_blocks(strategy: Strategy, names: Names, choices: Sequence[Choice]) -> dict[str, Treatment]:
    """What each block keeps for backward: as the budget chose, or as the policy says, with the overrides put in."""
    if isinstance(strategy.memory.recompute, Budget):
        if strategy.overrides:
            raise PlanError(
                "Strategy(overrides=...) with a Budget: the budget chooses for every block. Leave one of them away."
            )
        return {name: treatment for choice in choices for name, treatment in choice.treatments.items()}
    # Of all blocks, not of one stage's: `every` and `keep_last` count over the full model.
    treated = treatments(strategy.memory, names.blocks)
    overridden = match_table(strategy.overrides, treated, what="block")
    treated |= {name: _overridden(name, treated, override, strategy.memory) for name, override in overridden.items()}
    _refuse_idle_offload(strategy.memory, treated)
    return treated


def _overridden(
    name: str, treated: Mapping[str, Treatment], override: BlockOverride, memory: MemoryPolicy
) -> Treatment:
    """The block's treatment with its override put in. Raises: PlanError for an offload that the block cannot have."""
    treatment = treated[name]
    if override.recompute is not None:
        # every=1: a block that is named is treated, whatever its place in a run of `every` blocks.
        mode = override.recompute
        chosen = Recompute(mode=mode) if isinstance(mode, str) else replace(mode, every=1)
        treatment = replace(treatment, recompute=chosen)
    if override.offload is None:
        return treatment
    if override.offload and memory.offload is None:
        raise PlanError(
            f"overrides: {name!r} offload=True, but nothing says where to. Give "
            "MemoryPolicy(offload=ActivationOffload()) too."
        )
    if override.offload and name not in may_move(memory, list(treated)):
        raise PlanError(
            f"overrides: {name!r} offload=True, but ActivationOffload(keep_last=...) keeps it. Give a smaller keep_last."
        )
    return replace(treatment, offload=override.offload)


def _refuse_idle_offload(memory: MemoryPolicy, treated: Mapping[str, Treatment]) -> None:
    """See [Note: choices without effect]."""
    if memory.offload is not None and not any(treatment.offload for treatment in treated.values()):
        raise PlanError(
            f"ActivationOffload(keep_last={memory.offload.keep_last}) keeps all of the {len(treated)} blocks that are not "
            "overridden, so nothing is offloaded. Give a smaller keep_last, or leave offload away."
        )
