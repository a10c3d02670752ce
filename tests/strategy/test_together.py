"""One rank resolves a strategy for all: the others decide the same, and what they were given is the same."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

import meshkit as mk
from meshkit.mesh import MeshSpec
from meshkit.plan import Plan
from meshkit.program import read_program
from meshkit.resolve import _together, resolve
from meshkit.strategy import Strategy
from tests.laws.gate.cell import Cell
from tests.laws.gate.laws import strategy_of
from tests.laws.gate.models import build
from tests.laws.parity.cases import mesh_for
from tests.tiny import tiny_config
from tests.world import RankError, pool

CELLS = [
    Cell(model="lora", mesh="pp=2 tp=2", sequence=True, schedule="zbv"),
    Cell(model="transformers", mesh="cp=2 tp=2"),
    Cell(model="moe", mesh="dp_shard=2 tp=2 ep=2", precision="bf16"),
    Cell(mesh="pp=2 cp=2", recompute="budget"),
]


def told(cell: Cell) -> tuple[dict[str, str], dict[str, str]]:
    """What this rank has, and what it decides by itself."""
    model, plan = build(cell)
    strategy = strategy_of(cell, plan)
    alone = resolve(read_program(model).frozen(), strategy, MeshSpec.parse(cell.mesh))
    return shown(mk.parallelize(model, mesh_for(cell.mesh), strategy).resolved), shown(alone)


def shown(resolved: Any) -> dict[str, str]:
    """Every decision but the model's copy, and the functions of a schedule."""
    found = {each.name: getattr(resolved, each.name) for each in fields(resolved) if each.name != "program"}
    found["reading"] = found["reading"][1]
    if found["cut"] is not None:
        found["cut"] = {k: v for k, v in vars(found["cut"]).items() if k not in ("generate", "tensors")}
    return {name: repr(value) for name, value in found.items()}


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_rank_has_what_one_would_decide_by_itself(cell: Cell) -> None:
    for found, alone in pool(cell.spec.world_size).run(told, cell):
        assert found == alone


def given(what: str, rank: int) -> None:
    torch.manual_seed(0)
    odd = torch.distributed.get_rank() == rank
    layers = 3 if what == "layers" and odd else 2
    model = mk.models.Llama(tiny_config(num_hidden_layers=layers))
    if what == "frozen" and odd:
        model.get_submodule("norm").requires_grad_(False)
    if what == "dtype" and odd:
        model.double()
    if what == "code" and odd:
        made: dict[str, Any] = {"Base": type(model.get_submodule("norm"))}
        lines = "\n\nclass RMSNorm(Base):\n    def forward(self, x):\n        return super(RMSNorm, self).forward(x)\n"
        exec(compile(lines, "other_norms.py", "exec"), made)
        model.get_submodule("norm").__class__ = made["RMSNorm"]
    strategy = Strategy(
        zero=2 if what == "zero" and odd else 3,
        memory=mk.MemoryPolicy(recompute="full" if what == "recompute" and odd else "none"),
        plan=Plan(blocks=("layers.1",)) if what == "plan" and odd else None,
    )
    mk.parallelize(model, mesh_for("dp_shard=2"), strategy)


@pytest.mark.parametrize(
    ("what", "named"),
    [(each, "model") for each in ("layers", "frozen", "dtype")]
    + [("code", "code of the model")]
    + [(each, "strategy") for each in ("zero", "recompute", "plan")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_were_given_something_else_are_refused_on_all(what: str, named: str, rank: int) -> None:
    with pytest.raises(RankError) as error:
        pool(2).run(given, what, rank)
    text = str(error.value)
    assert text.count(f"PlanError: parallelize: ranks [1] were given another {named} than rank 0") == 2


def fails() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_together, "resolve", lambda *_, **__: 1 // 0)
        mk.parallelize(mk.models.Llama(tiny_config()), mesh_for("dp_shard=2"))


def test_an_error_of_the_first_rank_ends_the_others() -> None:
    with pytest.raises(RankError) as error:
        pool(2).run(fails)
    assert "parallelize: rank 0 raised ZeroDivisionError" in str(error.value)
