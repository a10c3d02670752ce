"""Recipes by name, for `meshkit train` and `meshkit copy`: where their files are, in a clone or in an installed wheel."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

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
    Raises: PlanError for no recipe after the options, and for options that torchrun does not take.
    """
    at = 0 if words and words[0] in RECIPES else _after_options(words)
    if at is None or words[at] not in RECIPES:
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


def _after_options(words: Sequence[str]) -> int | None:
    """Where the first word is that is no option of torchrun, and no value of one."""
    from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes

    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    parser.error = refuse  # type: ignore[method-assign]  # its own prints a page of usage
    try:
        parsed = parser.parse_args([*words, "none"])  # one word more, for where there is no recipe among them
        ranks, nodes = determine_local_world_size(parsed.nproc_per_node), parse_min_max_nnodes(parsed.nnodes)
        if ranks < 1 or nodes[0] < 1:
            refuse(f"--nproc-per-node {ranks} --nnodes {parsed.nnodes} makes no rank")
    except (ValueError, RuntimeError) as error:
        raise PlanError(
            f"train {' '.join(words)}: torchrun says: {str(error).rstrip('.')}. Correct its options."
        ) from None
    return len(words) - len(parsed.training_script_args) if parsed.training_script_args else None


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
