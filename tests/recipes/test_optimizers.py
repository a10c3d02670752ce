"""Optimizers of recipes by name, or as a function of one's own file; other words are refused in a line."""

from __future__ import annotations

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
        optimizer = build_optimizer(Flags(optimizer=word, lr=0.5), start(Cell(mesh="tp=1")))
    except mk.MeshkitError as error:
        return str(error)
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


@pytest.mark.parametrize("word", ["lion", "nowhere.py:sgd", ":", ""])
def test_other_words(word: str) -> None:
    (said,) = pool(1).run(made, word)
    assert said.startswith(f"--optimizer {word}: neither one of adamw, muon nor")
