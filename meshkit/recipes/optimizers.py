"""Optimizers of recipes, by name or as a function of the user's own file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.optim import Optimizer

from meshkit.core.import_file import import_function
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
    file = word.rpartition(":")[0]
    if not file or not Path(file).is_file():
        raise PlanError(
            f'--optimizer {word}: neither one of {", ".join(OPTIMIZERS)} nor "file.py:function" of a file that exists.'
        )
    return import_function(word, asked="--optimizer")
