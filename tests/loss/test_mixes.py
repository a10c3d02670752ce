"""A loss that mixes the rows of a batch is refused in its first step, on every rank; one of each row, and one that may have
effects, is not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.reach import reach_of
from meshkit.errors import PlanError
from meshkit.parallel.rows_tried import loss_of_rows
from tests.loss.test_mean import items, module, per_item, rows_of, run_of, whole
from tests.world import pool

Reduce = Callable[[Tensor, Tensor], Tensor]
REFUSED = "mixes the rows of a batch"
MIXES: dict[str, Reduce] = {
    "contrastive": lambda out, y: F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="sum"),
    "with the row before": lambda out, y: (out * out.roll(1, 0)).sum(),
    "by the row's number": lambda out, y: (out.sum(1) * torch.arange(len(out))).sum(),
    "of what is left of the mean": lambda out, y: (out - out.mean(0)).square().sum(),
    "the largest": lambda out, y: out.max(0).values.sum(),
    "by the root of the number": lambda out, y: per_item(out, y).sum() / len(out) ** 0.5,
    "with an auxiliary mean": lambda out, y: per_item(out, y).sum() + 0.01 * out.square().mean(),
    "with a load balance": lambda out, y: per_item(out, y).sum() + out.softmax(-1).mean(0).square().sum(),
    "noise by the root of the number": lambda out, y: (out * torch.randn_like(out)).square().sum() / len(out) ** 0.5,
    "of a constant by it": lambda out, y: torch.div(torch.tensor(3.0), out.sum()),
}
KEEPS: dict[str, Reduce] = {
    "cross-entropy": partial(F.cross_entropy, reduction="sum"),
    "weighted": lambda out, y: (per_item(out, y) * out.detach().softmax(-1).amax(-1)).sum(),
    "noise": lambda out, y: (out * torch.randn_like(out)).square().sum(),
}


def of(reduce: Reduce) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, part: dict[str, Tensor], reduce: Any = reduce) -> Tensor:
        return reduce(model(part["x"]), part["y"])

    return loss


@pytest.mark.parametrize("name", MIXES)
def test_the_loss_of_all_rows_is_not_the_sum_of_those_of_its_parts(name: str) -> None:
    assert loss_of_rows(module(), of(MIXES[name]), whole(6)) == "neither"
    assert loss_of_rows(module().to("meta"), of(MIXES[name]), whole(3)) == "neither"


@pytest.mark.parametrize(("name", "said"), [("cross-entropy", "sum"), ("weighted", "sum"), ("noise", "sum")])
def test_a_loss_of_each_row_adds_up(name: str, said: str | None) -> None:
    assert loss_of_rows(module(), of(KEEPS[name]), whole(6)) == said


class Auxiliary(nn.Module):
    """Returns a loss of means over rows beside its output, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = module()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.inner(x)
        return out, out.softmax(-1).mean(0).square().sum()


def both(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    out, auxiliary = model(part["x"])
    return per_item(out, part["y"]).sum() + len(out) * auxiliary


def first_steps(mesh: str, microbatches: int) -> dict[str, str]:
    run, found = run_of(mesh), {}
    for name, reduce in {**MIXES, **KEEPS}.items():
        try:
            run.forward_backward(rows_of(run, 8), microbatches=microbatches, loss=of(reduce), count=items)
        except PlanError as error:
            found[name] = str(error)
    run = mk.parallelize(Auxiliary(), run.mesh)
    try:
        run.forward_backward(rows_of(run, 8), microbatches=microbatches, loss=both, count=items)
    except PlanError as error:
        found["an auxiliary loss that the model returns"] = str(error)
    return found


@pytest.mark.parametrize(("mesh", "microbatches"), [("dp_shard=2", 1), ("tp=2", 2)])
def test_a_loss_that_mixes_rows_is_refused_in_its_first_step(mesh: str, microbatches: int) -> None:
    for found in pool(2).run(first_steps, mesh, microbatches):
        assert {*found} == {*MIXES, "an auxiliary loss that the model returns"}
        assert all(REFUSED in text for text in found.values())


MEANS: dict[str, Reduce] = {
    "mean": F.cross_entropy,
    "of rows' means": lambda out, y: torch.stack([row.square().mean() for row in out]).mean(),
}


def evaluations(mesh: str) -> dict[str, str]:
    run, found = run_of(mesh), {}
    for name, reduce in {**MIXES, **KEEPS, **MEANS}.items():
        try:
            run.evaluate(rows_of(run, 8), loss=of(reduce), count=items)
        except PlanError as error:
            found[name] = str(error)
        run.evaluate(rows_of(run, 8), loss=of(KEEPS["cross-entropy"]), count=lambda part: torch.tensor([8.0, 1.0]))
    return found


def test_an_evaluation_refuses_them_too_and_means() -> None:
    for found in pool(2).run(evaluations, "dp_shard=2"):
        assert {*found} == {*MIXES, *MEANS}
        assert all(f"evaluate: the loss 'loss' {REFUSED}" in found[name] for name in MIXES)
        assert all("evaluate: the loss 'loss' is a mean already" in found[name] for name in MEANS)
    assert pool(2).run(evaluations, "tp=2") == [{}, {}]


def test_on_one_data_rank_all_rows_are_there() -> None:
    assert pool(2).run(first_steps, "tp=2", 1) == [{}, {}]


# --------------------------------------------------------------------------------------------- losses that may have effects


SEEN: list[float] = []
_SUMS = torch.zeros(())
_SCALE = 2.0
_CRITERION = nn.CrossEntropyLoss(reduction="sum")
_TEACHER = nn.Linear(4, 5)


def logs(model: nn.Module, part: Any) -> Tensor:
    loss = model(part["x"]).sum()
    SEEN.append(float(loss))
    return loss


def says(model: nn.Module, part: Any) -> Tensor:
    print("loss")
    return model(part["x"]).sum()


FILE = sys.stderr


def writes(model: nn.Module, part: Any) -> Tensor:
    loss = model(part["x"]).sum()
    FILE.flush()
    return loss


def asks(model: nn.Module, part: Any) -> Tensor:
    os.getpid()
    return model(part["x"]).sum()


def sums_up(model: nn.Module, part: Any) -> Tensor:
    loss = model(part["x"]).sum()
    _SUMS.add_(loss.detach())
    return loss


def distills(model: nn.Module, part: Any) -> Tensor:
    return (model(part["x"]) - _TEACHER(part["x"])).square().sum()


def weighs(model: nn.Module, part: Any) -> Tensor:
    return _CRITERION(model(part["x"]) * _SCALE, part["y"]) + mk.cross_entropy(model(part["x"]), part["y"])


def calls_another(model: nn.Module, part: Any) -> Tensor:
    return logs(model, part) + sum(each(model, part) for each in (weighs, weighs))


class Counts:
    def __init__(self) -> None:
        self.calls = 0

    def loss(self, model: nn.Module, part: Any) -> Tensor:
        self.calls += 1
        return model(part["x"]).sum()


def counting() -> Callable[..., Tensor]:
    calls = 0

    def loss(model: nn.Module, part: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return model(part["x"]).sum()

    return loss


def of_another_room(teacher: nn.Module) -> Callable[..., Tensor]:
    """As a library's function that makes a loss of a model."""

    def loss(model: nn.Module, part: Any) -> Tensor:
        return (model(part["x"]) - teacher(part["x"])).square().sum()

    loss.__module__ = "meshkit.algos"
    return loss


def test_what_a_loss_notes_in_python_is_put_back_after_a_trial() -> None:
    counts, counted = Counts(), counting()
    for loss in (logs, distills, calls_another, counts.loss, counted, partial(logs), lambda m, p: logs(m, p)):
        assert not reach_of(loss).obstacle
        assert loss_of_rows(module(), loss, whole(6)) == "sum"
    assert loss_of_rows(module(), of_another_room(_TEACHER), whole(6)) == "sum"
    assert SEEN == []
    assert counts.calls == 0
    assert counted.__closure__ is not None
    assert counted.__closure__[0].cell_contents == 0
    assert all(not reach_of(loss).tensors for loss in (weighs, partial(weighs), of(MIXES["contrastive"]), both))


def test_what_a_trial_could_not_put_back_stands_in_its_way() -> None:
    for loss, said in (
        (says, "it calls `print`"),
        (writes, "it may write to `FILE`"),
        (asks, "it may call `os.getpid`"),
    ):
        assert loss_of_rows(module(), loss, whole(6)) is None
        assert said in reach_of(loss).obstacle


# ------------------------------------------------------------------------------------------------ losses that hold tensors

_WEIGHTS = torch.linspace(0.5, 2.0, 5, dtype=torch.float64)
_WEIGHTED = nn.CrossEntropyLoss(weight=_WEIGHTS, reduction="sum")


class Weighted:
    """A loss as an object with settings."""

    def __init__(self, weights: Tensor, mean: bool) -> None:
        self.weights, self.mean = weights, mean

    def count(self, part: Any) -> int:
        return len(part["y"])

    def __call__(self, model: nn.Module, part: Any) -> Tensor:
        if not self.mean:
            return F.cross_entropy(model(part["x"]), part["y"], weight=self.weights, reduction="sum")
        return F.cross_entropy(model(part["x"]), part["y"], weight=self.weights) * self.count(part)


def weighted_mean(model: nn.Module, part: Any) -> Tensor:
    return F.cross_entropy(model(part["x"]), part["y"], weight=_WEIGHTS) * len(part["y"])


def weighted_sum(model: nn.Module, part: Any) -> Tensor:
    return _WEIGHTED(model(part["x"]), part["y"])


def weighted_by(model: nn.Module, part: Any, *, weights: Tensor) -> Tensor:
    return F.cross_entropy(model(part["x"]), part["y"], weight=weights) * len(part["y"])


HELD_MIXES = (
    weighted_mean,
    partial(weighted_by, weights=_WEIGHTS.float()),
    Weighted(_WEIGHTS, True),
    Weighted(_WEIGHTS, True).__call__,
)
HELD_KEEPS = (weighted_sum, Weighted(_WEIGHTS, False), sums_up)


def test_a_loss_with_tensors_of_its_own_is_tried_with_copies_of_them() -> None:
    for loss in HELD_MIXES:
        assert loss_of_rows(module(), loss, whole(6)) == "neither"
    for loss in HELD_KEEPS:
        assert loss_of_rows(module(), loss, whole(6)) == "sum"
    assert torch.equal(_WEIGHTS, torch.linspace(0.5, 2.0, 5, dtype=torch.float64))
    assert float(_SUMS) == 0


def held_in_a_step(mesh: str) -> list[str]:
    run, found = run_of(mesh), []
    for loss in (weighted_mean, weighted_sum):
        try:
            run.forward_backward(rows_of(run, 8), loss=loss, count=items)
            found.append("")
        except PlanError as error:
            found.append(str(error))
    return found


def test_a_mean_by_weights_of_classes_is_refused_in_its_first_step() -> None:
    for mixes, keeps in pool(2).run(held_in_a_step, "dp_shard=2"):
        assert REFUSED in mixes
        assert keeps == ""
