"""Optimizers of recipes by name, or as a function of one's own file; other words are refused in a line."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import meshkit as mk
from meshkit.optim import Muon, ShardedAdamW
from meshkit.recipes import RampFlags, build_optimizer
from tests.laws.parity.cases import Cell, start
from tests.world import pool


@dataclass(frozen=True, kw_only=True)
class Flags(RampFlags):
    pass


def made(word: str) -> str:
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer = build_optimizer(Flags(optimizer=word, lr=0.5), start(Cell(mesh="tp=1")))
    except mk.MeshkitError as error:
        return str(error)
    if said:
        return str(said[0].message)
    assert optimizer.param_groups[0]["lr"] == 0.5
    return type(optimizer).__name__


def test_by_name() -> None:
    assert pool(1).run(made, "adamw") == [ShardedAdamW.__name__]
    assert pool(1).run(made, "muon") == [Muon.__name__]


def test_by_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "def sgd(run, *, lr, weight_decay):\n    return torch.optim.SGD(run.parameters(), lr=lr)\n"
        "def nothing(run, *, lr, weight_decay):\n    return None\n"
    )
    assert pool(1).run(made, f"{file}:sgd") == [torch.optim.SGD.__name__]
    (returned,) = pool(1).run(made, f"{file}:nothing")
    assert "it returns a NoneType. Return a torch.optim.Optimizer of run.parameters()." in returned
    (missing,) = pool(1).run(made, f"{file}:other")
    assert missing.endswith("the file has no function 'other'.")
    file.write_text("import nowhere")
    (broken,) = pool(1).run(made, f"{file}:sgd")
    assert "own.py: cannot be imported: ModuleNotFoundError: No module named 'nowhere'." in broken


def test_by_package() -> None:
    assert pool(1).run(made, "torch.optim:SGD") == [torch.optim.SGD.__name__]
    assert pool(1).run(made, "schedulefree:AdamWScheduleFree") == ["AdamWScheduleFree"]


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("lion", "there is no such torch.optim.Optimizer"),
        ("nowhere.py:sgd", "No module named 'nowhere'"),
        (":", "there is no such torch.optim.Optimizer"),
        ("", "there is no such torch.optim.Optimizer"),
        ("torch.optim:Lion", "there is no such torch.optim.Optimizer"),
        ("torch.nn:Linear", "there is no such torch.optim.Optimizer"),
        ("torch.optim:Rprop", "weight_decay"),
    ],
)
def test_other_words(word: str, match: str) -> None:
    (said,) = pool(1).run(made, word)
    assert said.startswith(
        f"--optimizer {word}: {match}" if "weight" not in match else f"--optimizer {word}: TypeError"
    )
    assert match in said and "\n" not in said


OWN = """
import torch

def of_others(run, *, lr, weight_decay):
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(3, 2))], lr=lr)

def of_some(run, *, lr, weight_decay):
    return torch.optim.SGD([param for param in run.parameters() if param.ndim == 1], lr=lr)

def of_a_model(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)

def raises(run, *, lr, weight_decay):
    raise KeyError("layers")

def lbfgs(run, *, lr, weight_decay):
    return torch.optim.LBFGS(run.parameters(), lr=lr)
"""


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("of_others", "group 0 has a parameter of shape [3, 2] that is not the run's"),
        ("of_some", " more, which will not be trained. Freeze what is to stay as it is"),
        (
            "of_a_model",
            "unexpected keyword argument 'weight_decay'. It is called as function(run, lr=, weight_decay=), and",
        ),
        ("raises", "KeyError: 'layers'. It is called as function(run, lr=, weight_decay=), and returns a torch.optim."),
        ("lbfgs", "LBFGS calls the model itself, by a closure, and a recipe steps once"),
    ],
)
def test_odd_functions_of_a_file(name: str, match: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    (said,) = pool(1).run(made, f"{file}:{name}")
    assert said.startswith(f"--optimizer {file}:{name}: ") and match in said and "\n" not in said


def test_a_file_that_is_no_python_file(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text(OWN)
    (said,) = pool(1).run(made, f"{file}:lbfgs")
    assert said == f"--optimizer {file}: cannot be imported: a Python file is called something.py."
