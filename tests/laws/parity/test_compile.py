"""Compiled blocks train as eager ones. aot_eager traces and partitions as inductor does, without its minutes."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

import meshkit as mk
from tests.depth import DEEP
from tests.laws.parity.cases import Cell, Moe, Outcome, run_cell
from tests.world import pool

pytestmark = pytest.mark.turns(4)

TOL_FP64 = 1e-10


def run_compiled_cell(cell: Cell) -> Outcome:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing probes attributes, .grad of non-leaves for one, that warn
        outcome = run_cell(cell)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    return outcome


AOT = {"compile": "aot_eager"}
SEQUENCE = Cell(
    mesh="tp=2", layers=1, sequence=True, recompute="full", documents=True, vocab=61, qwen=True, compile="aot_eager"
)
FEATURES = [  # one for each that changes what is traced
    (2, SEQUENCE),
    (2, Cell(mesh="pp=2", schedule="zb-h1", microbatches=3, documents=True, **AOT)),
    (2, Cell(mesh="cp=2", layers=1, window=5, recompute="selective", **AOT)),
    (2, Cell(mesh="dp_shard=2 ep=2", moe=Moe(experts=8, shared=24, balance=0.1), recompute="selective", **AOT)),
    (
        2,
        Cell(
            mesh="tp=2", layers=1, hidden_mlp=45, memory=mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss(tokens=5)), **AOT
        ),
    ),
]
MORE = [
    (4, replace(SEQUENCE, mesh="dp_shard=2 tp=2")),
    (2, Cell(mesh="dp_shard=2", **AOT)),
    (2, Cell(mesh="tp=2", layers=1, recompute="selective", **AOT)),
    (2, Cell(mesh="pp=2", schedule="zb-h1", microbatches=3, layers=3, documents=True, **AOT)),
    (2, Cell(mesh="cp=2", documents=True, recompute="full", **AOT)),
    (2, Cell(mesh="cp=2", documents=True, context=mk.strategy.ContextPolicy(scheme="ulysses"), **AOT)),
    (2, Cell(mesh="dp_shard=2", moe=Moe(shared=24, balance=0.1), **AOT)),
    (2, Cell(mesh="dp_shard=2 ep=2", moe=Moe(experts=8), recompute="full", **AOT)),
    (4, Cell(mesh="dp_shard=2 tp=2 ep=2", moe=Moe(z=0.1, balance=0.1), sequence=True, **AOT)),
]


@pytest.mark.parametrize(("ranks", "cell"), FEATURES + (MORE if DEEP else []), ids=str)
def test_compiled_blocks_equal_one_device(ranks: int, cell: Cell) -> None:
    for outcome in pool(ranks).run(run_compiled_cell, cell, timeout_s=240):
        assert max(outcome.loss, outcome.norm, outcome.gradient, outcome.parameter) <= TOL_FP64, outcome
