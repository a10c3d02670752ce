"""Optimizers of recipes: by name, a class of any package, or a function of the user's own file."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path

from torch.optim import Optimizer

from meshkit.core.import_file import import_function
from meshkit.errors import MeshkitError, PlanError
from meshkit.optim import adamw, muon
from meshkit.recipes.flags import RampFlags
from meshkit.step import Run

OPTIMIZERS: dict[str, Callable[..., object]] = {"adamw": adamw, "muon": muon}
_WORDS = (
    f'Give {", ".join(OPTIMIZERS)}, "package:Class" of an installed package, as torch.optim:SGD, or "file.py:function" of a '
    "file that exists."
)
_CALL = "It is called as function(run, lr=, weight_decay=), and returns a torch.optim.Optimizer of run.parameters()."


def build_optimizer(config: RampFlags, run: Run) -> Optimizer:
    """Of --optimizer: one of OPTIMIZERS; "package:Class" of a torch.optim.Optimizer, made of the run's trained parameters; or
    "file.py:function", called as `adamw` is: function(run, lr=, weight_decay=).

    Warns of trainable parameters that it leaves out. Raises: PlanError for another word, for a function that cannot be called
    so, raises, or returns no optimizer of the run's parameters, and for an optimizer that calls the model itself (LBFGS).
    """
    word = config.optimizer
    function = OPTIMIZERS.get(word) or _of_file(word) or _of_package(word)
    try:
        optimizer = function(run, lr=config.lr, weight_decay=config.weight_decay)
    except MeshkitError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].rstrip(".")
        raise PlanError(f"--optimizer {word}: {said}. {_CALL}") from error
    if not isinstance(optimizer, Optimizer):
        raise PlanError(
            f"--optimizer {word}: it returns a {type(optimizer).__name__}. Return a torch.optim.Optimizer of "
            "run.parameters()."
        )
    _refuse_closure(optimizer, word)
    _look_at_parameters(optimizer, run, word)
    return optimizer


def _refuse_closure(optimizer: Optimizer, word: str) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"--optimizer {word}: {type(optimizer).__name__} calls the model itself, by a closure, and a recipe steps once "
            "for each batch. Choose one whose step() needs none."
        )


def _look_at_parameters(optimizer: Optimizer, run: Run, word: str) -> None:
    names = {id(param): name for name, param in run.named_parameters()}
    has = set[int]()
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise PlanError(
                    f"--optimizer {word}: group {number} has a parameter of shape {list(param.shape)} that is not the run's, "
                    "and nothing would train the run's own. Give those of run.parameters()."
                )
            has.add(id(param))
    left = [name for name, param in run.named_parameters() if param.requires_grad and id(param) not in has]
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        warnings.warn(
            f"--optimizer {word}: it leaves out {', '.join(left[:3])}{more}, which will not be trained. Freeze what is to "
            "stay as it is, or give all of run.parameters().",
            stacklevel=3,
        )


def _of_file(word: str) -> Callable[..., object] | None:
    """None where there is no such file."""
    file = word.rpartition(":")[0]
    return import_function(word, asked="--optimizer") if file and Path(file).is_file() else None


def _of_package(word: str) -> Callable[..., object]:
    package, _, name = word.partition(":")
    try:
        kind = getattr(importlib.import_module(package), name, None) if name.isidentifier() else None
    except (ImportError, ValueError) as error:
        raise PlanError(f"--optimizer {word}: {error}. {_WORDS}") from error
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise PlanError(f"--optimizer {word}: there is no such torch.optim.Optimizer. {_WORDS}")
    made: Callable[..., object] = kind

    def make(run: Run, *, lr: float, weight_decay: float) -> object:
        return made([param for param in run.parameters() if param.requires_grad], lr=lr, weight_decay=weight_decay)

    return make


def set_mode(optimizer: Optimizer | None, *, trains: bool) -> None:
    """Some optimizers train at other values than those that are evaluated, as schedule-free ones: they have `train` and
    `eval`, which change the parameters from one to the other. Others stay as they are.
    """
    change = getattr(optimizer, "train" if trains else "eval", None)
    if callable(change):
        change()
