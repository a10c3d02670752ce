"""Optimizers of recipes, by name or as a function of the user's own file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.optim import Optimizer

from meshkit.core.import_file import import_file
from meshkit.errors import PlanError
from meshkit.optim import adamw, muon
from meshkit.recipes.flags import RampFlags
from meshkit.step import Run

OPTIMIZERS: dict[str, Callable[..., object]] = {"adamw": adamw, "muon": muon}


def build_optimizer(config: RampFlags, run: Run) -> Optimizer:
    """Of --optimizer: one of OPTIMIZERS, or "file.py:function", called as `adamw` is: function(run, lr=, weight_decay=).

    Raises: PlanError for another word, and for a function that returns no optimizer.
    """
    word = config.optimizer
    function = OPTIMIZERS.get(word) or _of_file(word)
    optimizer = function(run, lr=config.lr, weight_decay=config.weight_decay)
    if not isinstance(optimizer, Optimizer):
        raise PlanError(
            f"--optimizer {word}: it returns a {type(optimizer).__name__}. Return a torch.optim.Optimizer of "
            "run.parameters()."
        )
    return optimizer


def _of_file(word: str) -> Callable[..., object]:
    file, _, name = word.rpartition(":")
    if not file or not Path(file).is_file():
        raise PlanError(
            f'--optimizer {word}: neither one of {", ".join(OPTIMIZERS)} nor "file.py:function" of a file that exists.'
        )
    try:
        function = getattr(import_file(Path(file)), name, None)
    except ImportError as error:
        raise PlanError(f"--optimizer {word}: the file cannot be imported: {error}.") from error
    if not callable(function):
        raise PlanError(f"--optimizer {word}: the file has no function {name!r}.")
    found: Callable[..., object] = function
    return found
