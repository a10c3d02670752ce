"""An optimizer that cannot change a split model says so in its first step; those of torch that can equal one device."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import meshkit as mk
from meshkit.errors import PlanError
from tests.compare_shards import difference
from tests.laws.parity.cases import mesh_for, own_rows
from tests.world import pool
from tests.zoo.odd import ROWS, Layers, features, row_count, squares

TOL_FP64 = 1e-10
OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Layers().double()


def stepped(mesh: str, kind: str, made_before: bool) -> float | str:
    """How far parameters are off one device after two steps; or what the first step raises."""
    given, alone = model(), model()
    optimizer = OPTIMIZERS[kind](given.parameters(), lr=0.01) if made_before else None
    run = mk.parallelize(given, mesh_for(mesh))
    optimizer = optimizer or OPTIMIZERS[kind](run.parameters(), lr=0.01)
    oracle = OPTIMIZERS[kind](alone.parameters(), lr=0.01)
    for seed in range(2):
        batch = {name: value.double() for name, value in features(seed).items()}
        (squares(alone, batch) / ROWS).backward()
        run.forward_backward(own_rows(batch, run.mesh), loss=squares, count=row_count)
        try:
            optimizer.step()
        except PlanError as error:
            return str(error)
        oracle.step()
        optimizer.zero_grad()
        oracle.zero_grad()
    wanted = dict(alone.named_parameters())
    return max(difference(param, wanted[name]) for name, param in run.named_parameters())


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_replicate=2"])
def test_an_optimizer_that_was_made_before_the_split_is_refused_at_its_first_step(mesh: str) -> None:
    for said in pool(2).run(stepped, mesh, "SGD", True):
        assert (
            "SGD: 16 of its parameters, 'enter.weight' first, are those that the model had before it was split"
            in str(said)
        )
        assert "Make the optimizer after parallelize, of run.parameters(), or by mk.adamw(run)" in str(said)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_of_torch_equal_one_device_on_shards(kind: str) -> None:
    for off in pool(2).run(stepped, "dp_shard=2", kind, False):
        assert float(off) < TOL_FP64


def added_group() -> str:
    given = model()
    old = given.get_parameter("leave.weight")
    run = mk.parallelize(given, mesh_for("dp_shard=2"))
    optimizer = torch.optim.SGD([param for name, param in run.named_parameters() if name != "leave.weight"], lr=0.01)
    batch = {name: value.double() for name, value in features(0).items()}
    run.forward_backward(own_rows(batch, run.mesh), loss=squares, count=row_count)
    optimizer.step()
    optimizer.add_param_group({"params": [old]})
    with pytest.raises(PlanError) as error:
        optimizer.step()
    return str(error.value)


def test_a_group_of_parameters_of_before_the_split_is_refused_when_it_is_added_later() -> None:
    for said in pool(2).run(added_group):
        assert (
            "SGD: 1 of its parameters, 'leave.weight' first, are those that the model had before it was split" in said
        )


def adafactor() -> str:
    run = mk.parallelize(model(), mesh_for("dp_shard=2"))
    optimizer = torch.optim.Adafactor(run.parameters())
    batch = {name: value.double() for name, value in features(0).items()}
    run.forward_backward(own_rows(batch, run.mesh), loss=squares, count=row_count)
    with pytest.raises(PlanError) as error:
        optimizer.step()
    return str(error.value)


def test_adafactor_on_shards_is_refused_with_what_to_use() -> None:
    for said in pool(2).run(adafactor):
        assert "Adafactor: it scales each step by norms and means of rows and columns of whole matrices" in said
        assert "use mk.adamw(run) with OptimizerPolicy(states=" in said


def holds_nothing() -> bool:
    """Whether a parameter of before is freed once its shard is there."""
    given = model()
    first = weakref.ref(next(given.parameters()))
    run = mk.parallelize(given, mesh_for("dp_shard=2"))
    gc.collect()
    return first() is None and run is not None


def test_parameters_of_before_are_not_held() -> None:
    assert all(pool(2).run(holds_nothing))
