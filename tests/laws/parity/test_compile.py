"""Compiled blocks train as eager ones. aot_eager traces and partitions as inductor does, without its minutes."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch

import meshkit as mk
from meshkit.preflight.explain import Message
from meshkit.preflight.order import Call, recording
from tests.depth import DEEP
from tests.laws.parity.cases import Cell, Moe, Outcome, run_cell
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


AOT = {"compile": "aot_eager"}
SEQUENCE = Cell(
    mesh="tp=2", layers=1, sequence=True, recompute="full", documents=True, vocab=61, qwen=True, compile="aot_eager"
)
SPARSE = mk.strategy.ContextPolicy(sparse=mk.strategy.BlockTopK(block=3, top=2))
FEATURES = [  # one for each that changes what is traced
    (2, SEQUENCE),
    (2, Cell(mesh="pp=2", schedule="zb-h1", microbatches=3, documents=True, **AOT)),
    (2, Cell(mesh="cp=2", layers=1, window=5, recompute="selective", **AOT)),
    (2, Cell(mesh="cp=2", layers=1, documents=True, context=SPARSE, **AOT)),
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


def bytes_of_compiled_blocks(
    mesh: str, sequence: bool, backend: str
) -> tuple[Counter[Message], Counter[Message], list[str]]:
    """What a step sends, what is explained of it, and the calls recorded in order."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = mk.models.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=16,
    )
    built = mk.init_mesh(mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = mk.parallelize(mk.models.Llama(config), built, mk.Strategy(compile=backend, sequence=sequence))
        ids = torch.randint(0, 64, (2, 17))
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
        with recording(built) as events, mk.observe(built) as seen:
            run.forward_backward(batch)
            mk.step.grad_norm(run)
    said = mk.explain(run, rows=2, seq_len=16).messages
    return seen, said, [event.op for event in events if isinstance(event, Call)]


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize(("mesh", "sequence"), [("tp=2", False), ("tp=2", True), ("dp_shard=2", False)])
def test_what_compiled_blocks_send_is_observed_recorded_and_explained(mesh: str, sequence: bool, backend: str) -> None:
    for seen, said, calls in pool(2).run(bytes_of_compiled_blocks, mesh, sequence, backend, timeout_s=240):
        assert seen == said
        assert calls.count("all_reduce") >= sum(times for message, times in said.items() if message.op == "all_reduce")
