"""A loss that draws random numbers for the model's input, as of diffusion, is refused on pp; noise in the batch is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.errors import PlanError
from tests.laws.parity.cases import mesh_for
from tests.world import pool
from tests.zoo.odd import OUT, ROWS, WIDTH, Layers

TOL_FP64 = 1e-12


def model() -> nn.Module:
    torch.manual_seed(0)
    return Layers().double()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for name in ("x", "noise")}


def draws(model: Any, part: dict[str, Tensor]) -> Tensor:
    noise = torch.randn_like(part["x"])
    return (model(part["x"] + noise) - noise[:, :OUT]).square().sum()


def draws_afterwards(model: Any, part: dict[str, Tensor]) -> Tensor:
    out = model(part["x"])
    return (out * (1 + 0 * torch.rand_like(out))).square().sum()


def given(model: Any, part: dict[str, Tensor]) -> Tensor:
    return (model(part["x"] + part["noise"]) - part["noise"][:, :OUT]).square().sum()


def step(loss: Any) -> str | float:
    run = mk.parallelize(model(), mesh_for("pp=2"), example=mk.Example((batch()["x"],)))
    torch.manual_seed(run.mesh.rank)
    state = torch.get_rng_state()
    try:
        value = run.forward_backward(
            batch(), loss=loss, count=lambda part: torch.tensor(len(part["x"])), microbatches=2
        )
    except PlanError as error:
        assert torch.equal(torch.get_rng_state(), state)
        return str(error)
    return float(value)


def test_a_loss_that_draws_for_its_model_is_refused_on_every_stage() -> None:
    for said in pool(2).run(step, draws):
        assert isinstance(said, str)
        assert "draws random numbers before it calls the model" in said


@pytest.mark.parametrize("loss", [given, draws_afterwards])
def test_noise_of_the_batch_and_draws_after_the_model_are_the_same_on_all_stages(loss: Any) -> None:
    wanted = float(loss(model(), batch()).detach()) / ROWS
    for said in pool(2).run(step, loss):
        assert said == pytest.approx(wanted, abs=TOL_FP64)
