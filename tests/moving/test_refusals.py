"""A move that is refused leaves the run as it was, on every rank, and says why in one line."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

import meshkit as mk
from meshkit.core.sharding import local_tensor
from meshkit.faults.corruption import CorruptionGuard
from meshkit.strategy import OptimizerPolicy
from tests.checkpoint.training import Training, build, refusal
from tests.world import pool

SPEC = "dp_shard=2"


class Twice(torch.optim.SGD):
    """Keeps parameters where no move looks."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.slow = {"all": list(params)}


class NoMove:
    """A loader of somebody else's."""


def with_gradients(training: Training) -> None:
    training.run.forward_backward(next(training.loader))
    training.run.move(mesh="tp=2", optimizer=training.optimizer)


def of_other_state(training: Training) -> None:
    memory = mk.MemoryPolicy(optimizer=OptimizerPolicy(states="8bit"))
    training.run.move(memory=memory, optimizer=training.optimizer)


def under_guard(training: Training) -> None:
    with CorruptionGuard(training.run, training.optimizer):
        training.run.move(mesh="tp=2", optimizer=training.optimizer)


def with_another(optimizer: Callable[[Training], Optimizer]) -> Callable[[Training], Any]:
    return lambda training: training.run.move(mesh="tp=2", optimizer=optimizer(training))


REFUSED: dict[str, tuple[Callable[[Training], Any], str]] = {
    "mesh": (lambda t: t.run.move(mesh="tp=4", optimizer=t.optimizer), "MeshError: mesh tp=4 needs a multiple of 4"),
    "choice": (lambda t: t.run.move(mesh="pp=2", optimizer=t.optimizer, zero=3), "PlanError: pipeline: 2 stages"),
    "gradients": (with_gradients, "have gradients, 'embed_tokens.weight' first"),
    "state": (of_other_state, "state as 'plain', and under the new strategy as '8bit'"),
    "guard": (under_guard, "a CorruptionGuard looks at"),
    "attributes": (
        with_another(lambda t: Twice(list(t.run.parameters()))),
        "a Twice keeps tensors or an optimizer in its attribute 'slow'",
    ),
    "stranger": (
        with_another(lambda t: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)),
        "group 0 holds a parameter of shape (2,) that is not the model's",
    ),
    "loader": (lambda t: t.run.move(mesh="tp=2", loader=NoMove()), "a NoMove has no move(mesh)"),
}


def refused() -> dict[str, tuple[str, bool]]:
    """(the error, whether the run is as it was) of each; then it goes on, as one that was never asked."""
    training, other = build(SPEC), build(SPEC)
    losses = [each.train(1) for each in (training, other)]
    for each in (training, other):
        each.optimizer.zero_grad()
    found = {}
    for name, (act, _) in REFUSED.items():
        model, before = training.run.model, training.local_state()
        text = refusal(lambda act=act: act(training))  # type: ignore[misc]  # mypy knows no defaults of lambdas
        training.optimizer.zero_grad()
        if name == "gradients":
            next(other.loader)
            before = training.local_state()
        found[name] = text, training.run.model is model and training.local_state() == before
    losses = [each.train(1) for each in (training, other)]
    found["goes on"] = "", losses[0] == losses[1] and training.local_state() == other.local_state()
    return found


def test_a_refused_move_changes_nothing() -> None:
    for found in pool(2).run(refused):
        for name, (_, said) in REFUSED.items():
            assert said in found[name][0], name
            assert "\n" not in found[name][0], name
        assert all(same for _, same in found.values()), found


def apart() -> tuple[str, float, bool]:
    """Each rank asks for another strategy."""
    training = build(SPEC)
    training.train(1)
    training.optimizer.zero_grad()
    spec = ("tp=2", "cp=2")[training.run.mesh.rank]
    began = time.monotonic()
    text = refusal(lambda: training.run.move(mesh=spec, optimizer=training.optimizer))
    took = time.monotonic() - began
    return text, took, len(training.train(1)) == 1


def test_ranks_that_ask_for_different_strategies_are_named() -> None:
    for text, took, goes_on in pool(2).run(apart):
        assert "AgreementError" in text and "tp=2" in text and "cp=2" in text
        assert took < 30
        assert goes_on


def after_the_move() -> tuple[str, str, list[int]]:
    training = build(SPEC)
    training.train(1)
    training.optimizer.zero_grad()
    old, param = training.run.model, next(training.run.parameters())
    training.run.move(mesh="tp=2")  # without the optimizer
    ids = torch.zeros(1, 8, dtype=torch.int64)
    return refusal(lambda: old(ids)), refusal(training.optimizer.step), list(local_tensor(param).shape)


def test_what_is_left_of_the_old_run_says_so() -> None:
    for called, stepped, shape in pool(2).run(after_the_move):
        assert "StepError: this model was moved to another strategy" in called
        assert "those that the model had before it was split or moved" in stepped
        assert shape == [0]
