"""A forward or a loss that goes through all of the model's parameters, of which a stage has its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from tests.laws.parity.cases import mesh_for
from tests.world import RankError, pool
from tests.zoo.case import Cell
from tests.zoo.sweep import verdict


@pytest.mark.parametrize("name", ["DtypeOfFirst", "CountsElements", "CountsTied", "CountsModules", "CountsInLoss"])
def test_parameters_of_other_stages_are_counted(name: str) -> None:
    row = verdict(Cell.of(f"odd.{name}", "pp=2"))
    assert row.outcome == "equal", f"{row.text}\n{row.traceback}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PenaltyKept", "reads 'lm_head.weight' outside of the module that has it"),
        ("PenaltyInLoss", "reads something that has no values on the last stage: parameters of other stages"),
    ],
)
def test_a_penalty_that_a_loss_reads_is_refused(name: str, text: str) -> None:
    row = verdict(Cell.of(f"odd.{name}", "pp=2"))
    assert row.outcome == "refused", f"{row.text}\n{row.traceback}"
    assert text in row.text


class Sequences(nn.Module):
    """Blocks that hold modules by number. In a forward they answer what is asked of any."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.leave = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x) * len(layer) * sum(part in layer for part in layer) * layer[0].out_features
        return self.leave(x)


def by_length(model: Any, part: dict[str, Tensor]) -> Tensor:
    return model(part["x"]).square().sum() * len(model.layers[0])


def by_weight(model: Any, part: dict[str, Tensor]) -> Tensor:
    return model(part["x"]).square().sum() + model.layers[0][0].weight.square().sum()


def by_parts(model: Any, part: dict[str, Tensor]) -> Tensor:
    return model(part["x"]).square().sum() + sum(each.weight.square().sum() for each in [*model.layers[0]][:1])


def step_off(loss: Any) -> float:
    """How far the loss of a step is off one device."""
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(4, 6, dtype=torch.float64, generator=generator)}
    torch.manual_seed(0)
    expected = loss(Sequences().double(), batch) / 4
    torch.manual_seed(0)
    run = mk.parallelize(Sequences().double(), mesh_for("pp=2"), example=mk.Example((batch["x"],)))
    found = run.forward_backward(batch, loss=loss, count=lambda part: torch.tensor(len(part["x"])))
    return float(((found - expected) / expected).detach().abs())


def test_a_block_of_another_stage_holds_as_many_modules_as_it_does() -> None:
    assert max(pool(2).run(step_off, by_length)) < 1e-10


@pytest.mark.parametrize("loss", [by_weight, by_parts])
def test_a_loss_that_takes_a_block_of_another_stage_apart_is_refused(loss: Any) -> None:
    with pytest.raises(
        RankError, match="the loss function reads a module of another stage: 'layers.0' is on another rank"
    ):
        pool(2).run(step_off, loss)
