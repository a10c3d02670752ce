"""Compiled blocks train as eager ones. aot_eager traces and partitions as inductor does, without its minutes."""

from __future__ import annotations

import warnings

import pytest
import torch

import meshkit as mk
from tests.depth import thin
from tests.parity.cases import Cell, Moe, Outcome, run_cell
from tests.world import pool

TOL_FP64 = 1e-10


def run_compiled_cell(cell: Cell) -> Outcome:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing probes attributes, .grad of non-leaves for one, that warn
        outcome = run_cell(cell)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    return outcome


@pytest.mark.parametrize(
    ("ranks", "cell"),
    thin(
        [
            (2, Cell(mesh="dp_shard=2", compile="aot_eager", zero=3)),
            (2, Cell(mesh="tp=2", compile="aot_eager", layers=1, sequence=True, vocab=61, qwen=True)),
            (
                4,
                Cell(
                    mesh="dp_shard=2 tp=2",
                    compile="aot_eager",
                    layers=1,
                    sequence=True,
                    recompute="full",
                    documents=True,
                ),
            ),
            (2, Cell(mesh="tp=2", compile="aot_eager", layers=1, recompute="selective")),
            (2, Cell(mesh="pp=2", compile="aot_eager", schedule="zb-h1", microbatches=3, layers=2, documents=True)),
            (2, Cell(mesh="cp=2", compile="aot_eager", layers=1, documents=True, recompute="full")),
            (2, Cell(mesh="cp=2", compile="aot_eager", layers=1, window=5, recompute="selective")),
            (2, Cell(mesh="cp=2", compile="aot_eager", documents=True, context=mk.ContextPolicy(scheme="ulysses"))),
            (2, Cell(mesh="dp_shard=2", compile="aot_eager", moe=Moe(shared=24, balance=0.1))),
            (2, Cell(mesh="dp_shard=2 ep=2", compile="aot_eager", moe=Moe(experts=8), recompute="full")),
            (2, Cell(mesh="dp_shard=2 ep=2", compile="aot_eager", moe=Moe(experts=8), recompute="selective")),
            (4, Cell(mesh="dp_shard=2 tp=2 ep=2", compile="aot_eager", moe=Moe(z=0.1, balance=0.1), sequence=True)),
            (
                2,
                Cell(mesh="tp=2", compile="aot_eager", layers=1, memory=mk.MemoryPolicy(loss=mk.ChunkedLoss(tokens=5))),
            ),
        ],
        2,
    ),
    ids=str,
)
def test_compiled_blocks_equal_one_device(ranks: int, cell: Cell) -> None:
    for outcome in pool(ranks).run(run_compiled_cell, cell, timeout_s=240):
        assert max(outcome.loss, outcome.norm, outcome.gradient, outcome.parameter) <= TOL_FP64, outcome
