"""Recipe: a training script and its flags, as estimate and explain take them.

The script needs two names: a dataclass `Config` of its flags, and `build(config, mesh) -> Run`, which it calls itself. The
config has `mesh`, `seq_len`, `global_batch` and `microbatches`. Used if there: `build_optimizer(config, run)`, and
`estimated_loss(model, batch)` for a model that makes no logits.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import tyro

from meshkit.checkpoint import InMemory
from meshkit.errors import MeshError, PlanError
from meshkit.mesh import Mesh, MeshSpec
from meshkit.preflight.estimate._estimate import Kernels, estimate
from meshkit.preflight.estimate._result import Estimate
from meshkit.step import Run, next_token_loss

NEEDED = ("mesh", "seq_len", "global_batch")

PROTOCOL = (
    "The command needs two names in the script, which it can use itself: a frozen dataclass `Config` of its flags, with "
    "mesh, seq_len, global_batch and microbatches, and `build(config, mesh) -> mk.Run`, which makes the model on meta and "
    'calls mk.parallelize; and `if __name__ == "__main__":` before it starts to train. See docs/recipes.md.'
)


@dataclass(frozen=True)
class Recipe:
    """A script and its flags."""

    module: ModuleType
    config: Any

    @staticmethod
    def read(module: ModuleType, args: list[str], *, script: Path) -> Recipe:
        """With the flags of a command line: by `Config.parse` where there is one, as in meshkit's recipes, else by tyro."""
        parse = getattr(module.Config, "parse", None) or partial(tyro.cli, module.Config)
        return Recipe(module, parse(args=args, prog=f"... {script}", description=""))

    @property
    def microbatches(self) -> int:
        return int(getattr(self.config, "microbatches", 1))

    def spec(self, world_size: int | None) -> MeshSpec:
        """Raises: MeshError where the axes do not fit the world."""
        spec = MeshSpec.parse(self.config.mesh)
        if world_size is not None and world_size < 1:
            raise MeshError(f"--world {world_size}: a world has at least 1 rank. Give their number, or leave it out.")
        return spec.resolve(world_size if world_size is not None else spec.world_size)

    def rows(self, spec: MeshSpec) -> int:
        """Sequences of the rank that has most."""
        return -(-int(self.config.global_batch) // (spec.dp_replicate * spec.dp_shard))

    def changed(self, **flags: Any) -> Recipe:
        return Recipe(self.module, dataclasses.replace(self.config, **flags))

    def build(self, mesh: Mesh) -> Run:
        run: Run = self.module.build(self.config, mesh)
        return run

    def step(self, spec: MeshSpec) -> dict[str, Any]:
        """What `estimate` takes besides the model, of the rank that has most rows."""
        make = getattr(self.module, "build_optimizer", None)
        return {
            "rows": self.rows(spec),
            "seq_len": int(self.config.seq_len),
            "microbatches": self.microbatches,
            "optimizer": None if make is None else partial(make, self.config),
            "loss": getattr(self.module, "estimated_loss", next_token_loss),
        }

    def estimate(self, spec: MeshSpec, coordinate: dict[str, int], kernels: Kernels) -> Estimate:
        kept = InMemory(copies=self.config.memory_copies) if getattr(self.config, "memory_every", 0) else None
        return estimate(self.build, spec, coordinate=coordinate, kernels=kernels, in_memory=kept, **self.step(spec))


def load_script(
    path: Path,
    *,
    verb: str = "estimate",
    needs: Sequence[str] = ("Config", "build"),
    flags: Sequence[str] = NEEDED,
    protocol: str = PROTOCOL,
) -> ModuleType:
    """The script as a module, without running its main. verb: the command, for errors.

    needs: names of the script; flags: of its Config. protocol: what the command asks of a script, in words.
    Raises: PlanError for a file that is not there, and for one without these names.
    """
    if not path.is_file():
        raise PlanError(
            f"{verb}: there is no file {path}. Give the path of a training script, or the name of a recipe, as pretrain."
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise PlanError(f"{verb}: {path} is not a Python file. Give the path of a training script.")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # dataclasses look their annotations up there
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, UnicodeDecodeError) as error:
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise PlanError(f"{verb}: {path}{line} is no Python: {error}. Correct it.") from error
    finally:
        sys.path.remove(str(path.parent))
        if before is not None:
            sys.modules[path.stem] = before
    missing = [name for name in needs if not hasattr(module, name)]
    if missing:
        raise PlanError(f"{verb}: {path} has no {' and no '.join(missing)}. {protocol}")
    fields = {field.name for field in dataclasses.fields(module.Config)} if _is_config(module) else set()
    if lacking := [name for name in flags if name not in fields]:
        raise PlanError(f"{verb}: Config of {path} has no {', '.join(lacking)}. {protocol}")
    return module


def _is_config(module: ModuleType) -> bool:
    return dataclasses.is_dataclass(module.Config)
