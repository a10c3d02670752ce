"""The modules of a model that its plan names."""

from __future__ import annotations

from dataclasses import dataclass

from meshkit.plan import Plan, match_names
from meshkit.plan.auto import auto_plan
from meshkit.plan.match import match_blocks
from meshkit.program import Program


@dataclass(frozen=True)
class Names:
    """The plan, and the modules of the model that it names."""

    plan: Plan
    blocks: tuple[str, ...]
    units: tuple[str, ...]
    mlps: tuple[str, ...]


def name_modules(program: Program, plan: Plan | None) -> Names:
    """plan: None for what names tell."""
    plan = plan or auto_plan(program.model)
    blocks, units = (tuple(match_blocks(patterns, program.modules)) for patterns in (plan.blocks, plan.units))
    return Names(plan, blocks, units, tuple(match_names(plan.mlps, program.modules, what="module")))
