"""Recipes by name, for `meshkit train` and `meshkit copy`: where their files are, in a clone or in an installed wheel."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from meshkit.errors import DataError, PlanError

RECIPES = {
    "pretrain": "llama_pretrain.py",
    "moe": "moe_pretrain.py",
    "long": "long_context.py",
    "diloco": "diloco_pretrain.py",
    "sft": "sft.py",
    "reward": "reward_model.py",
    "dpo": "dpo.py",
    "rejection": "rejection_sampling.py",
    "ppo": "ppo.py",
    "grpo": "grpo.py",
    "distill": "distill.py",
    "own": "bring_your_own_model.py",
}
_PACKAGE = Path(__file__).parents[1]
# The wheel has the files of `examples/` inside of the package; a clone has them beside it.
_FOLDERS = (_PACKAGE / "examples", _PACKAGE.parent / "examples")


def recipe_file(name: str) -> Path:
    """The file of a recipe by its name in `RECIPES`. Raises: PlanError for another name, and where the file is not there."""
    if name not in RECIPES:
        raise PlanError(f"there is no recipe {name!r}. Choose one of {', '.join(RECIPES)}.")
    for folder in _FOLDERS:
        if (folder / RECIPES[name]).is_file():
            return folder / RECIPES[name]
    raise PlanError(
        f"recipe {name}: {RECIPES[name]} is in none of {', '.join(map(str, _FOLDERS))}. Install meshkit anew."
    )


def train(words: Sequence[str]) -> None:
    """Run a recipe: `meshkit train [OPTIONS OF TORCHRUN] RECIPE [FLAGS OF THE RECIPE]`.

    Without options of torchrun it runs in this process, which may itself be a rank of `torchrun -m meshkit train RECIPE`.
    Raises: PlanError for no recipe among the words.
    """
    at = next((number for number, word in enumerate(words) if word in RECIPES), None)
    if at is None:
        said = " ".join(words) or "nothing"
        raise PlanError(
            f"train needs the name of a recipe and got {said}. Say meshkit train [--nproc-per-node N] RECIPE [FLAGS]; "
            f"recipes are {', '.join(RECIPES)}."
        )
    script, flags = str(recipe_file(words[at])), list(words[at + 1 :])
    if at:
        launch = [sys.executable, "-m", "torch.distributed.run", *words[:at], script, *flags]
        sys.stdout.flush()
        os.execv(sys.executable, launch)  # signals go to torchrun itself
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


def copy(name: str, to: str | os.PathLike[str]) -> Path:
    """Copy a recipe's file into a folder, or under a name of its own; returns where. Raises: DataError if that is there."""
    source, target = recipe_file(name), Path(to)
    if target.is_dir():
        target /= source.name
    if target.exists():
        raise DataError(f"copy {name}: {target} is there already. Remove it, or give another name.")
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise DataError(f"copy {name}: {target} cannot be written: {error.strerror}. Give a folder that can.") from None
    return target
