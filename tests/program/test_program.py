"""The copy without values that decisions are read from: it changes nothing of the model, nor does the model change it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import meshkit as mk
from meshkit.program import read_program
from tests.compare_shards import difference
from tests.laws.parity.cases import Cell, batches, build, mesh_for
from tests.plan.test_plan import MLP
from tests.world import run_ranks


class Delegating(nn.Module):
    """What is set on it is set on what it wraps, as with torch.compile's wrapper."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        vars(self)["closed"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "closed" in vars(self):
            setattr(self.inner, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def test_a_copy_writes_nothing_to_modules_that_hand_attributes_on() -> None:
    wrappers: list[nn.Module] = [Delegating(MLP()), torch.compile(MLP(), backend="eager")]
    for wrapped in wrappers:
        model = nn.Sequential(MLP(), wrapped)
        before = {name: id(param) for name, param in model.named_parameters()}
        copied = read_program(model).frozen()
        assert {name: id(param) for name, param in model.named_parameters()} == before
        assert list(copied.parameters) == list(before) and all(param.is_meta for param in copied.parameters.values())
        with torch.compiler.set_stance("force_eager"):
            assert torch.isfinite(model(torch.ones(2, 8))).all()


def full_model_again(axes: str) -> tuple[list[str], float]:
    """Names of hooked modules of `run.full_model`, and what a second run made of it differs from the first by."""
    mesh, cell = mesh_for(axes), Cell(mesh=axes)
    run = mk.parallelize(build(cell), mesh)
    hooked = [
        name for name, module in run.full_model.named_modules() if module._forward_hooks or module._forward_pre_hooks
    ]
    copy.deepcopy(run.full_model)  # what `estimate` does to it
    again = mk.parallelize(run.full_model, mesh, run.strategy)
    mk.init_weights(again.model, seed=0)
    mk.init_weights(run.model, seed=0)
    batch = batches(cell)[0]
    rows = {name: tensor.tensor_split(mesh.data_ranks)[mesh.data_rank] for name, tensor in batch.items()}
    losses = [each.forward_backward(rows) for each in (run, again, run)]
    return hooked, max(difference(loss, losses[0]) for loss in losses)


def test_the_full_model_of_a_run_carries_none_of_its_hooks() -> None:
    for axes in ("dp_shard=2", "tp=2"):
        for hooked, worst in run_ranks(2, full_model_again, axes):
            assert hooked == [] and worst == 0
