"""A parameter that has no gradient on one device has none on pp, wherever it is detached; AdamW tells that from zeros."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.errors import StepError
from meshkit.strategy import PipelinePolicy
from tests.compare_shards import difference
from tests.depth import thin
from tests.laws.parity.cases import mesh_for, own_rows
from tests.world import pool, run_ranks

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


@pytest.mark.parametrize(
    ("loss", "mesh", "schedule", "tied"),
    thin(
        [
            (loss, *run, tied)
            for loss in (of_out, of_middle, of_side)
            for run in (("pp=2", "1f1b"), ("pp=2", "zbv"), ("pp=2 dp_shard=2", "1f1b"))
            for tied in (False, True)
        ],
        3,
    ),
)
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


def some_rows(model: Any, part: dict[str, Tensor]) -> Tensor:
    """The sides of some rows have a loss; where a part of the batch has none of them, there is no gradient."""
    given = model(part["x"])
    used = part["x"][:, 0] > 0
    return given["out"].square().sum() + (given["side"][used].sum() if used.any() else 0)


def out_or_side(model: Any, part: dict[str, Tensor]) -> Tensor:
    return model(part["x"])["out" if part["x"][0, 0] > 0 else "side"].square().sum()


def signed(*signs: float) -> dict[str, Tensor]:
    """signs: of the rows, by turns."""
    return {"x": rows()["x"] * torch.tensor(signs, dtype=torch.float64).repeat(ROWS // len(signs))[:, None]}


def refusals(mesh: str, loss: Any, batches: list[dict[str, Tensor]], tied: bool) -> str:
    """What a rank is told after steps on these batches, and whether its parameters have been what one device has."""
    single, device = model(False, tied), mesh_for(mesh)
    run = mk.parallelize(model(False, tied), device, example=mk.Example((rows()["x"],)), microbatches=2)
    ours, theirs = optimizer_of(run), optimizer_of(single)
    for batch in batches:
        (loss(single, batch) / ROWS).backward()
        try:
            run.forward_backward(own_rows(batch, device), loss=loss, count=count)
        except StepError as error:
            return str(error)
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
        wanted = dict(single.named_parameters(remove_duplicate=False))
        off = max(difference(param, wanted[name]) for name, param in run.named_parameters())
        if off > TOL_FP64:
            return f"{off} off"
    return "equal"


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2 dp_shard=2", "pp=2 dp_replicate=2"])
@pytest.mark.parametrize(
    ("loss", "first", "later", "tied", "told"),
    [
        (now_and_then, -1.0, 1.0, False, "a gradient at value [0-9]"),
        (now_and_then, 1.0, -1.0, False, "no gradient at value [0-9]"),
        (out_or_side, -1.0, 1.0, True, "a gradient at (value|tied weight) [0-9]"),
        (out_or_side, 1.0, -1.0, True, "(a|no) gradient at (value|tied weight) [0-9]"),
    ],
)
def test_a_step_with_other_gradients_than_the_first_is_refused_alike_on_every_rank(
    mesh: str, loss: Any, first: float, later: float, tied: bool, told: str
) -> None:
    batches = [signed(first), signed(first), signed(later)]
    texts = run_ranks(mk.MeshSpec.parse(mesh).world_size, refusals, mesh, loss, batches, tied)
    (text,) = set(texts)
    assert re.search(rf"the loss has {told}.* in the first step of its kind", text), text


def test_rows_of_one_data_rank_alone_may_have_no_gradient() -> None:
    """Then the others' are the gradient, in a first step and later."""
    some = {"x": signed(1.0)["x"] * torch.cat([torch.ones(ROWS // 2), -torch.ones(ROWS // 2)]).double()[:, None]}
    batches = [some, {"x": -some["x"]}, signed(1.0), some]
    assert set(run_ranks(4, refusals, "pp=2 dp_shard=2", some_rows, batches, False)) == {"equal"}


class Frozen(Chain):
    """With a tied weight that is not trained at first."""

    def __init__(self) -> None:
        super().__init__(False, True)
        self.first.weight.requires_grad_(False)


def thawed(mesh: str) -> float:
    torch.manual_seed(0)
    single = Frozen().double()
    torch.manual_seed(0)
    run = mk.parallelize(Frozen().double(), mesh_for(mesh), example=mk.Example((rows()["x"],)), microbatches=2)
    worst = 0.0
    for step in range(4):
        for each in (single, run.model):
            each.requires_grad_(True) if step in (1, 3) else None
            if step in (0, 2):
                for name, param in each.named_parameters():
                    param.requires_grad_(name not in ("first.weight", "last.weight"))
        (of_out(single, rows()) / ROWS).backward()
        run.forward_backward(own_rows(rows(), run.mesh), loss=of_out, count=count)
        wanted = dict(single.named_parameters(remove_duplicate=False))
        for name, param in run.named_parameters():
            grad, right = param.grad, wanted[name].grad
            if (grad is None) != (right is None):
                return torch.inf
            if grad is not None:
                worst = max(worst, difference(grad, right))
        for each in (single, run.model):
            for param in each.parameters():
                param.grad = None
    return worst


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2 dp_shard=2"])
def test_a_tied_weight_may_be_thawed_and_frozen_between_steps(mesh: str) -> None:
    assert max(run_ranks(mk.MeshSpec.parse(mesh).world_size, thawed, mesh)) < TOL_FP64
