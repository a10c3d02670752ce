"""A forward that mixes the rows of a batch is refused on data ranks, whatever it mixes them by; others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.program import Example, read_program
from meshkit.resolve import resolve
from meshkit.strategy import Strategy
from tests.laws.parity.cases import mesh_for
from tests.world import pool
from tests.zoo.odd import ROWS, WIDTH, Layers, features, row_count, squares

Middle = Callable[[Tensor], Tensor]
MIXES: dict[str, Middle] = {
    "by their mean": lambda x: x - x.mean(0),
    "by their largest": lambda x: x / x.abs().amax(0, keepdim=True),
    "by a sum of all": lambda x: x / x.exp().sum(),
    "by their number": lambda x: x / x.shape[0],
    "in reverse": lambda x: x + x.flip(0),
    "rolled": lambda x: x + x.roll(1, 0),
    "in another order": lambda x: x.lerp(x[torch.arange(x.shape[0] - 1, -1, -1)], 0.3),
    "with the first": lambda x: x + x[:1],
    "with the last": lambda x: x * x[-1],
    "by products of two": lambda x: (x @ x.T).tanh() @ x,
    "by products of features": lambda x: x @ (x.T @ x).tanh(),
    "by softmax": lambda x: x * x.softmax(0),
    "normalised": lambda x: F.batch_norm(x, None, None, training=True),
    "summed up": lambda x: x + x.cumsum(0),
    "by a running largest": lambda x: x + x.cummax(0).values,
    "sorted": lambda x: x + x.sort(0).values,
    "by distances": lambda x: x * torch.cdist(x, x).mean(1, keepdim=True),
    "by frequencies": lambda x: x + torch.fft.fft(x, dim=0).real,
    "by their norm": lambda x: x.renorm(2, 1, 1.0),
}


class Doubled(torch.autograd.Function):
    """Nothing is known of a backward that is written by hand and is none of elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(1).flip(1) * 2


KEEPS: dict[str, Middle] = {
    "by features": lambda x: x.flip(1) + x.softmax(1) + x.sort(1).values + x.cumsum(1) + torch.fft.fft(x).real,
    "laid end to end": lambda x: (x.flatten() * 2).view(-1, WIDTH),
    "sorted by values and put back": lambda x: (x[(o := x.detach().sum(1).argsort())] * 2)[o.argsort()],
    "a feature by its value": lambda x: x * x.gather(1, x.detach().argmax(1, keepdim=True)),
    "with a backward of its own": Doubled.apply,
    "by its own norm": lambda x: x.renorm(2, 0, 1.0),
}


def model_of(middle: Middle) -> nn.Module:
    torch.manual_seed(0)
    model = Layers().double()
    model.middle = middle  # type: ignore[method-assign]
    return model


def resolved(model: nn.Module, mesh: str) -> None:
    example = Example((torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta"),))
    resolve(read_program(model, example), Strategy(), MeshSpec.parse(mesh))


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_replicate=2", "pp=2"])
@pytest.mark.parametrize("name", MIXES)
def test_rows_that_are_mixed_are_refused(name: str, mesh: str) -> None:
    with pytest.raises(PlanError, match="mixes the rows of a batch"):
        resolved(model_of(MIXES[name]), mesh)


@pytest.mark.parametrize("name", KEEPS)
def test_rows_that_are_kept_apart_are_not(name: str) -> None:
    resolved(model_of(KEEPS[name]), "dp_shard=2")


class Pairs(nn.Module):
    """Compares all rows with all, and returns the features too, of which a loss may be made row by row."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.layers, self.alone = Layers(), alone

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out = self.layers(x)
        return (out @ out.T,) if self.alone else (out @ out.T, out)


def test_of_an_output_with_rows_of_its_own_a_loss_may_read_those() -> None:
    resolved(Pairs(alone=False).double(), "dp_shard=2")
    with pytest.raises(PlanError, match="mixes the rows of a batch"):
        resolved(Pairs(alone=True).double(), "dp_shard=2")


def first_step(name: str, mesh: str) -> str:
    """What is raised of a model of which nothing told what it takes."""
    run = mk.parallelize(model_of({**MIXES, **KEEPS}[name]), mesh_for(mesh))
    batch = {key: value.double() for key, value in features(0).items()}
    batch = {key: value.chunk(run.mesh.data_ranks)[run.mesh.data_rank] for key, value in batch.items()}
    try:
        run.forward_backward(batch, loss=squares, count=row_count)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_replicate=2"])
def test_without_an_example_the_first_step_shows_it(mesh: str) -> None:
    for name in ("normalised", "in reverse"):
        for said in pool(2).run(first_step, name, mesh):
            assert "mixes the rows of a batch" in said
    assert pool(2).run(first_step, "by features", mesh) == ["", ""]
