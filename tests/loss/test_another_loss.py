"""A loss of the same code that holds something else is judged again; one whose numbers change in each step not for ever."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshkit.core.held_values import Judged, held_values
from tests.loss.test_mean import REFUSED, items, raised, rows_of, run_of
from tests.world import pool

LossOf = Callable[[str], Callable[..., Tensor]]


def reduced(model: nn.Module, part: dict[str, Tensor], reduction: str = "sum", step: int = 0) -> Tensor:
    return F.cross_entropy(model(part["x"]), part["y"], reduction=reduction)


def as_closure(reduction: str) -> Callable[..., Tensor]:
    def loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        return reduced(model, part, reduction)

    return loss


class AsObject:
    def __init__(self, reduction: str) -> None:
        self.settings = {"reduction": reduction}

    def __call__(self, model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        return reduced(model, part, **self.settings)

    def method(self, model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        return self(model, part)


MODE = "sum"


def by_a_global(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    return reduced(model, part, MODE)


def set_global(reduction: str) -> Callable[..., Tensor]:
    global MODE
    MODE = reduction
    return by_a_global


WAYS: dict[str, LossOf] = {
    "closure": as_closure,
    "partial": lambda reduction: partial(reduced, reduction=reduction),
    "argument of a partial": lambda reduction: partial(partial(reduced, step=3), reduction=reduction),
    "object": AsObject,
    "method": lambda reduction: AsObject(reduction).method,
    "default": lambda reduction: lambda m, p, reduction=reduction: reduced(m, p, reduction),  # type: ignore[misc]
    "global": set_global,
}


def second(way: str, microbatches: int) -> list[str]:
    run = run_of("dp_shard=2")
    step = partial(run.forward_backward, rows_of(run, 8), microbatches=microbatches, count=items)
    step(loss=WAYS[way]("sum"))
    return [raised(partial(step, loss=WAYS[way]("mean"))), raised(partial(step, loss=WAYS[way]("sum")))]


@pytest.mark.parametrize("way", WAYS)
def test_a_second_loss_of_the_same_code_is_judged_by_what_it_holds(way: str) -> None:
    for mean, again in pool(2).run(second, way, 1):
        assert "is a mean already" in mean
        assert REFUSED.split(",")[0] in mean
        assert again == ""


def with_two_parts() -> str:
    """One data rank: rows are tried with the first two microbatches."""
    run = run_of("tp=2")
    whole = rows_of(run, 8)

    def mixes(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        out = model(part["x"])
        return (out - out.mean(0)).square().sum()

    run.forward_backward(whole, loss=mixes, count=items)
    return raised(lambda: run.forward_backward(whole, loss=mixes, count=items, microbatches=2))


def test_a_loss_that_saw_all_rows_is_judged_when_it_sees_a_part() -> None:
    assert all("mixes the rows" in text for text in pool(2).run(with_two_parts))


def due(losses: list[Any]) -> list[int]:
    judged, found = Judged(), []
    for step, loss in enumerate(losses):
        if judged.is_due(held := held_values(loss)):
            judged.add(held)
            found.append(step)
    return found


def test_losses_made_anew_with_the_same_values_are_judged_once() -> None:
    weights = torch.ones(3)
    assert due([partial(reduced, reduction="sum", step=4) for _ in range(50)]) == [0]
    assert due([as_closure("sum") for _ in range(50)]) == [0]
    assert due([AsObject("sum") for _ in range(50)]) == [0]
    assert due([lambda m, p: (m(p) * weights).sum() for _ in range(50)]) == [0]


def test_numbers_and_tensors_that_change_in_each_step_are_judged_some_times_alone() -> None:
    steps = [partial(reduced, step=step) for step in range(1000)]
    assert due(steps) == [0, 1, 2, 3, 4, 5, 6, 10, 18, 34, 66, 130, 258, 514]
    assert len(due([partial(reduced, weight=torch.tensor(0.1 * step)) for step in range(1000)])) < 15
    assert len(due([partial(reduced, tag=f"step {step}") for step in range(1000)])) < 45


def test_a_change_that_stays_is_judged_at_last() -> None:
    annealed = [partial(reduced, step=step) for step in range(100)]
    assert any(step >= 100 for step in due([*annealed, *[partial(reduced, step=7.5)] * 100]))


def test_a_weight_of_zero_is_another_kind_than_one_that_counts() -> None:
    assert due([partial(reduced, weight=weight) for weight in (0.0, 0.0, 0.3, 0.3)]) == [0, 2]
