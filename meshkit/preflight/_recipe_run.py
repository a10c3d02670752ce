"""A training script and its flags, resolved without ranks: what forecast, search and place ask of one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.mesh import MeshSpec
from meshkit.preflight._resolved_run import resolved_run
from meshkit.preflight.estimate import Kernels
from meshkit.preflight.estimate.recipe import Recipe, load_script
from meshkit.preflight.forecast import Batch
from meshkit.resolve import Resolved
from meshkit.step import Loss


@dataclass(frozen=True, kw_only=True)
class RecipeRun:
    """config: the script's flags. spec: its mesh. batch, microbatches, loss: of its step."""

    config: Any
    resolved: Resolved
    spec: MeshSpec
    batch: Batch
    microbatches: int
    loss: Loss


def recipe_run(script: Path, flags: list[str], *, world: int | None, kernels: Kernels, verb: str) -> RecipeRun:
    """world: ranks; None, the product of the mesh's axes. verb: for errors."""
    recipe = Recipe.read(load_script(script, verb=verb), flags, script=script)
    spec = recipe.spec(world)
    step = recipe.step(spec)
    with resolved_run(recipe.build, spec, None, {}, kernels=kernels, verb=verb) as resolved:
        pass  # what is resolved outlives the world in which it was
    return RecipeRun(
        config=recipe.config,
        resolved=resolved,
        spec=spec,
        batch=Batch(sequences=int(recipe.config.global_batch), seq_len=step["seq_len"]),
        microbatches=step["microbatches"],
        loss=step["loss"],
    )
