"""A parameter that has no gradient on one device has none on pp, wherever it is detached; AdamW tells that from zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.strategy import PipelinePolicy
from tests.compare_shards import difference
from tests.laws.parity.cases import mesh_for, own_rows
from tests.world import RankError, pool, run_ranks

TOL_FP64 = 1e-12
WIDTH, ROWS, STEPS = 8, 8, 3


class Chain(nn.Module):
    """Rows of features, through a first layer, blocks and a last one; returned with what the first layer makes."""

    def __init__(self, detached: bool, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.detached = detached
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        side = self.side(x.detach())
        for block in self.blocks:
            x = block(x)
        return {"out": self.last(x.detach() if self.detached else x), "middle": x, "side": side * 2}


def of_out(model: Any, part: dict[str, Tensor]) -> Tensor:
    return model(part["x"])["out"].square().sum()


def of_middle(model: Any, part: dict[str, Tensor]) -> Tensor:
    return model(part["x"])["middle"].square().sum()


def of_side(model: Any, part: dict[str, Tensor]) -> Tensor:
    return model(part["x"])["side"].square().sum()


def now_and_then(model: Any, part: dict[str, Tensor]) -> Tensor:
    """The sides of some batches have a loss, by what the batch says."""
    given = model(part["x"])
    return given["out"].square().sum() + (given["side"].sum() if part["x"][0, 0] > 0 else 0)


def rows(sign: float = 1) -> dict[str, Tensor]:
    return {"x": sign * torch.linspace(0.5, 1.5, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)}


def count(part: dict[str, Tensor]) -> Tensor:
    return torch.tensor(len(part["x"]))


def model(detached: bool, tied: bool) -> nn.Module:
    torch.manual_seed(0)
    return Chain(detached, tied).double()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def apart(mesh: str, schedule: str, losses: list[Any], detached: bool, tied: bool) -> float:
    """How far parameters are off after steps with these losses, by turns; inf where one has a gradient and the other none."""
    single = model(detached, tied)
    device, policy = mesh_for(mesh), PipelinePolicy(schedule=schedule)
    example = mk.Example((rows()["x"],))
    run = mk.parallelize(model(detached, tied), device, pipeline=policy, example=example, microbatches=2)
    ours, theirs = optimizer_of(run), optimizer_of(single)
    worst = 0.0
    for step in range(STEPS * len(losses)):
        loss = losses[step % len(losses)]
        (loss(single, rows()) / ROWS).backward()
        run.forward_backward(own_rows(rows(), device), loss=loss, count=count)
        wanted = dict(single.named_parameters(remove_duplicate=False))
        for name, param in run.named_parameters():
            if (param.grad is None) != (wanted[name].grad is None):
                return torch.inf
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
        worst = max(worst, *(difference(param, wanted[name]) for name, param in run.named_parameters()))
    return worst


@pytest.mark.parametrize(("mesh", "schedule"), [("pp=2", "1f1b"), ("pp=2", "zbv"), ("pp=2 dp_shard=2", "1f1b")])
@pytest.mark.parametrize("loss", [of_out, of_middle, of_side])
@pytest.mark.parametrize("tied", [False, True])
def test_what_a_later_stage_detaches_or_the_loss_leaves_out_has_no_gradient(
    mesh: str, schedule: str, loss: Any, tied: bool
) -> None:
    ranks = mk.MeshSpec.parse(mesh).world_size
    for detached in (False, True):
        assert max(pool(ranks).run(apart, mesh, schedule, [loss], detached, tied)) < TOL_FP64


def test_it_has_none_through_several_stages() -> None:
    assert max(pool(4).run(apart, "pp=4", "1f1b", [of_out], True, True)) < TOL_FP64


def test_each_loss_has_its_own() -> None:
    assert max(pool(2).run(apart, "pp=2", "1f1b", [of_out, of_side, of_middle], True, True)) < TOL_FP64


def two_kinds_of_step(first: float, second: float) -> None:
    run = mk.parallelize(model(False, False), mesh_for("pp=2"), example=mk.Example((rows()["x"],)), microbatches=2)
    for sign in (first, second):
        run.forward_backward(rows(sign), loss=now_and_then, count=count)


def test_a_gradient_that_was_not_there_in_the_first_step_is_refused() -> None:
    with pytest.raises(
        RankError, match=r"the loss has a gradient at value \d of what stage 0 hands on, and in the first"
    ):
        run_ranks(2, two_kinds_of_step, -1.0, 1.0)


def test_a_gradient_that_was_there_in_the_first_step_alone_is_refused() -> None:
    with pytest.raises(
        RankError, match=r"the loss has no gradient at value \d of what stage 0 hands on, and in the first"
    ):
        run_ranks(2, two_kinds_of_step, 1.0, -1.0)
