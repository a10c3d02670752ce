"""What is changed after parallelize: right on data ranks, or refused in the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshkit as mk
from meshkit.core.gradient import gradient_of
from meshkit.errors import PlanError
from tests.compare_shards import difference
from tests.laws.parity.cases import mesh_for, own_rows
from tests.world import pool
from tests.zoo.odd import OUT, ROWS, WIDTH, Layers, features, row_count, squares

TOL_FP64 = 1e-12


def replaced(model: Any) -> None:
    torch.manual_seed(1)
    model.leave = nn.Linear(WIDTH, OUT).double()


def added(model: Any) -> None:
    model.blocks[0].late = nn.Parameter(torch.ones(WIDTH).double())


def hooked(model: Any) -> None:
    model.leave.weight.register_hook(lambda grad: grad * 0.5)


def frozen(model: Any) -> None:
    model.blocks[0].requires_grad_(False)


def scaled_in_place(model: Any) -> None:
    with torch.no_grad():
        model.leave.weight.mul_(0.5)


def hooked_module(model: Any) -> None:
    model.blocks[0].register_forward_hook(lambda module, args, out: out * 0.5)


def frozen_added(model: Any) -> None:
    model.late = nn.Parameter(torch.ones(WIDTH).double(), requires_grad=False)


def changed(change: Callable[[Any], None], mesh: str) -> float | str:
    """How far the gradients of a step after the change are off one device; or what it raises."""
    torch.manual_seed(0)
    alone = Layers().double()
    torch.manual_seed(0)
    run = mk.parallelize(Layers().double(), mesh_for(mesh))
    batches = [{name: value.double() for name, value in features(seed).items()} for seed in range(2)]
    run.forward_backward(own_rows(batches[0], run.mesh), loss=squares, count=row_count)
    for model in (run.model, alone):
        change(model)
        for param in model.parameters():
            param.grad = None
    (squares(alone, batches[1]) / ROWS).backward()
    try:
        run.forward_backward(own_rows(batches[1], run.mesh), loss=squares, count=row_count)
    except PlanError as error:
        return str(error)
    wanted = dict(alone.named_parameters())
    for name, param in run.named_parameters():
        assert (gradient_of(param) is None) == (wanted[name].grad is None)
    given = [(param.grad, wanted[name].grad) for name, param in run.named_parameters() if param.grad is not None]
    return max(difference(found, want) for found, want in given if want is not None)


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_replicate=2"])
@pytest.mark.parametrize("change", [frozen, scaled_in_place, hooked_module, frozen_added])
def test_these_changes_are_right(change: Callable[[Any], None], mesh: str) -> None:
    assert all(float(off) < TOL_FP64 for off in pool(2).run(changed, change, mesh))


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_replicate=2"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replaced, "parameter 'leave.weight' was made after parallelize: no data rank sums its gradient"),
        (added, "parameter 'blocks.0.late' was made after parallelize: no data rank sums its gradient"),
        (hooked, "parameter 'leave.weight' has got a hook on its gradient after parallelize"),
    ],
)
def test_these_would_be_lost_and_are_refused(change: Callable[[Any], None], said: str, mesh: str) -> None:
    for text in pool(2).run(changed, change, mesh):
        assert said in str(text)
