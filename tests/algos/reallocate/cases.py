"""Models and runs for the tests of reallocation."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

import meshkit as mk
from tests.laws.parity.cases import Cell, Moe, build, plan_of


@dataclass(frozen=True)
class Model:
    cell: Cell

    @property
    def plan(self) -> mk.Plan:
        return plan_of(self.cell)

    @property
    def experts(self) -> bool:
        return self.cell.moe is not None


DENSE = Model(Cell(mesh="", layers=3, dtype="float32", qwen=True))
TIED_ODD = Model(Cell(mesh="", layers=3, dtype="float32", tied=True, vocab=61, hidden_mlp=45, heads=(6, 2)))
FEW_HEADS = Model(Cell(mesh="", layers=3, dtype="float32", heads=(5, 1)))  # stored whole on every tensor rank
EXPERTS = Model(Cell(mesh="", layers=3, dtype="float32", moe=Moe(experts=6, shared=12, bias=True)))
MODELS = (DENSE, TIED_ODD, EXPERTS)


@lru_cache
def whole_model(model: Model) -> nn.Module:
    made = build(model.cell)
    for number, buffer in enumerate(made.buffers()):
        if buffer.is_floating_point():
            buffer.fill_(number + 0.5)
    return made


@lru_cache(maxsize=64)
def mesh_on(spec: str, ranks: tuple[int, ...]) -> mk.Mesh:
    """Groups live as long as the rank, so examples share them."""
    return mk.init_mesh(spec, ranks=ranks)


def start(model: Model, spec: str, ranks: tuple[int, ...], dtype: str, *, values: bool) -> mk.Run | None:
    """A run of `whole_model`, or of one with -7 everywhere; None outside of the ranks."""
    mesh = mesh_on(spec, ranks)
    if not mesh.here:
        return None
    made = copy.deepcopy(whole_model(model)).to(getattr(torch, dtype))
    with torch.no_grad():
        for tensor in [*made.parameters(), *made.buffers()]:
            tensor.fill_(-7) if not values and tensor.is_floating_point() else None
    return mk.parallelize(made, mesh, plan=model.plan)
