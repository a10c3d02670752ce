"""Copies without values: whatever way a module is reached by, the copy reaches the copy of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshkit.errors import PlanError
from meshkit.program import pointed_at, tensors, trace, without_values

X = torch.zeros(2, 3)


def double(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * 2


class Holder:
    def __init__(self, module: nn.Module) -> None:
        self.module = module


class Model(nn.Module):
    def __init__(self, way: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.run = way(self)

    def method(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        run = self.run
        while isinstance(run, list | dict | tuple):
            run = run["a"] if isinstance(run, dict) else run[0]
        return run(x)


WAYS: dict[str, Callable[[Any], Any]] = {
    "list": lambda model: [model.inner],
    "nested": lambda model: {"a": [(model.inner, 1)]},
    "bound method": lambda model: model.method,
    "other's function": lambda model: MethodType(double, model),
    "partial": lambda model: partial(double, model),
    "closure": lambda model: lambda x: model.inner(x),
    "closure of a list": lambda model: (lambda inside: lambda x: inside[0](x))([model.inner]),
    "forward": lambda model: model.inner.forward,
}


@pytest.mark.parametrize("name", WAYS)
def test_the_copy_reaches_the_copy(name: str) -> None:
    model = Model(WAYS[name])
    for read in (trace(model, (X,), {}), trace(without_values(without_values(model)), (X,), {})):
        used = {read.storages[ref.storage].source for each in read.operations for ref in tensors(each.args)}
        assert {"parameter inner.weight", "parameter inner.bias"} <= used
        assert "constant" not in used
    copy: Any = without_values(model)
    assert copy(X.to("meta")).is_meta
    assert model(X).shape == (2, 3)


def test_a_function_that_points_at_no_module_stays_the_same() -> None:
    rate = 3
    model: Any = Model(lambda model: lambda x: x * rate)
    assert without_values(model).run is model.run  # type: ignore[union-attr]


def test_a_list_that_holds_itself() -> None:
    model: Any = Model(lambda model: [model.inner])
    model.run.append(model.run)
    copy: Any = without_values(model)
    assert copy.run[1] is copy.run
    assert copy.run[0] is copy.inner


def test_an_object_that_holds_a_module_is_refused() -> None:
    model = Model(lambda model: None)
    holder = Holder(model.inner)
    model.run = holder  # type: ignore[assignment]
    model.forward = lambda x: holder.module(x)  # type: ignore[method-assign]
    for each in (model, without_values(model)):
        with pytest.raises(PlanError, match=r"reaches a parameter \[3, 3\]"):
            trace(each, (X,), {})


def test_parameters_outside_of_modules_are_found() -> None:
    model: Any = Model(lambda model: {"weights": [model.inner.weight]})
    assert list(pointed_at(model)) == [("", "run", "inner.weight")]
    model.run = lambda x, weight=None, bias=model.inner.bias: x + bias
    assert list(pointed_at(model)) == []
    weight = model.inner.weight
    model.run = lambda x: x @ weight
    assert list(pointed_at(model)) == [("", "run", "inner.weight")]
