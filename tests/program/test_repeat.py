"""What a reading of one call cannot show: a model that runs something else at its next call is refused, others are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshkit.errors import PlanError
from meshkit.program import Example, Trace, read_program, trace, twice

X = torch.zeros(2, 3)


class Keeps(nn.Module):
    """change(model, x): what the forward does beside a linear layer."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(3, 3), change
        self.calls, self.before, self.seen = 0, None, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, self.linear(x))


def read(model: nn.Module) -> Trace:
    return trace(model, (X,), {}, again=twice)


def counts(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return x


def asks(model: Any, x: Tensor) -> Tensor:
    model.calls = model.calls + 1
    return x.tanh() if model.calls > 1000 else x


def every_third(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return x if model.calls % 3 else x.tanh()


def keeps(model: Any, x: Tensor) -> Tensor:
    model.before = x.detach()
    return x


def reads_what_it_kept(model: Any, x: Tensor) -> Tensor:
    before, model.before = model.before, x.detach()
    return x if before is None else x + before.mean()


def grows(model: Any, x: Tensor) -> Tensor:
    model.seen.append(x)
    return torch.stack(model.seen).sum(0)


def scales(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return x * model.calls


def draws(model: Any, x: Tensor) -> Tensor:
    return x.tanh() if random.random() < 1e-9 else x


@pytest.mark.parametrize("change", [counts, keeps])
def test_what_is_only_kept_changes_no_program(change: Callable[[Any, Tensor], Tensor]) -> None:
    model = Keeps(change)
    read(model)
    assert (model.calls, model.before, model.seen) == (0, None, [])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (asks, "depends on 'calls', which each call changes"),
        (every_third, "depends on 'calls', which each call changes"),
        (reads_what_it_kept, "second call runs something else at test_repeat.py"),
        (grows, "second call runs something else"),
        (scales, "second call runs something else"),
        (draws, "Python's `random`"),
    ],
)
def test_what_the_next_call_does_otherwise_is_refused(change: Callable[[Any, Tensor], Tensor], text: str) -> None:
    model = Keeps(change)
    with pytest.raises(PlanError, match=text):
        read_program(model).read(Example((X,)), {})
    assert (model.calls, model.before, model.seen) == (0, None, [])
