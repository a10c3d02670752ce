"""What a reading of one call cannot show: a model that runs something else at its next call is refused, others are not."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
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


# ------------------------------------------------------------------------------------------- wherever a model keeps it


def later(say: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Another function from a far call on, as `say` tells of what the model keeps."""

    def change(model: Any, x: Tensor) -> Tensor:
        return x.tanh() if say(model) else x

    return change


def counted(model: Any) -> int:
    model.calls += 1
    return model.calls  # type: ignore[no-any-return]


def in_a_record(model: Any) -> bool:
    model.record.calls += 1
    return bool(model.record.calls > 1000)


def in_a_counter(model: Any) -> bool:
    model.counter["calls"] += 1
    return model.counter["calls"] > 1000


def in_a_list(model: Any) -> bool:
    model.history.append(1)
    return len(model.history) > 1000


ASKED: dict[str, Callable[[Any], Any]] = {
    "divided": lambda model: counted(model) / 3 > 1000,
    "bits": lambda model: counted(model) & 4096,
    "made whole": lambda model: int(counted(model)).bit_length() > 12,
    "an index": lambda model: model.table[counted(model)],
    "of numpy": lambda model: setattr(model, "of_numpy", model.of_numpy + 1) or model.of_numpy > 1000,
    "a record": in_a_record,
    "a counter": in_a_counter,
    "a list": in_a_list,
    "an iterator": lambda model: next(model.numbers) > 1000,
    "numpy's generator": lambda model: model.generator.random() < 1e-9,
    "Python's generator": lambda model: model.python.random() < 1e-9,
}


def with_all(change: Callable[[Any, Tensor], Tensor]) -> Keeps:
    model: Any = Keeps(change)
    model.record, model.counter, model.history = SimpleNamespace(calls=0), Counter(calls=0), list[int]()
    model.table, model.of_numpy, model.numbers = [False] * 2000, np.int64(0), itertools.count()
    model.generator, model.python = np.random.default_rng(0), random.Random(0)
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_of_state_is_refused_and_state_is_left_as_it_was(name: str) -> None:
    model: Any = with_all(later(ASKED[name]))
    draws = model.generator.bit_generator.state, model.python.getstate()
    with pytest.raises(PlanError, match="which each call changes"):
        read(model)
    assert (model.calls, model.record.calls, model.counter["calls"], model.history) == (0, 0, 0, [])
    assert next(model.numbers) == 0
    assert (model.generator.bit_generator.state, model.python.getstate()) == draws


def test_what_only_counts_is_not_refused_wherever_it_is() -> None:
    def change(model: Any, x: Tensor) -> Tensor:
        model.calls += 1
        model.record.calls = model.record.calls * 2 + 1
        model.counter["calls"] += 1
        model.history.append(len(x))
        f"{model.calls} {model.record.calls}"
        return x

    read(with_all(change))


def test_numpys_own_numbers_are_refused_as_pythons_are() -> None:
    with pytest.raises(PlanError, match="numpy"):
        read(Keeps(later(lambda model: np.random.random() < 1e-9)))


class Doubled(nn.Linear):
    """A kind of layer that a model may ask for."""


def of_this_class(model: Any, x: Tensor) -> Tensor:
    return 2 * x if type(model.linear) is nn.Linear else x


def by_its_attribute(model: Any, x: Tensor) -> Tensor:
    return 2 * x if model.linear.__class__ in (nn.Linear, Doubled) else x


def raises_for_others(model: Any, x: Tensor) -> Tensor:
    return {nn.Linear: x, Doubled: 2 * x}[type(model.linear)]


def by_isinstance(model: Any, x: Tensor) -> Tensor:
    return 2 * x if isinstance(model.linear, nn.Linear) else x


def by_name(model: Any, x: Tensor) -> Tensor:
    return 2 * x if type(model.linear).__name__ == "Linear" else x


@pytest.mark.parametrize("change", [of_this_class, by_its_attribute, raises_for_others])
def test_what_runs_for_the_exact_class_of_a_module_is_refused(change: Callable[[Any, Tensor], Tensor]) -> None:
    """On a mesh it is a subclass."""
    with pytest.raises(PlanError, match=r"the exact class of a module .* Use isinstance"):
        read(Keeps(change))


@pytest.mark.parametrize("change", [by_isinstance, by_name])
def test_what_runs_for_a_kind_of_module_is_read(change: Callable[[Any, Tensor], Tensor]) -> None:
    model = Keeps(change)
    assert read(model).operations
    assert type(model.linear) is nn.Linear
