"""Law 7: the collectives a step runs are those `explain` says, and no others."""

from __future__ import annotations

from collections import Counter

import pytest

import meshkit as mk
from meshkit.explain import Message, explain
from meshkit.models.llama_plan import LLAMA_PLAN
from meshkit.observe import observe
from tests.parity.cases import ROWS, TOKENS, Cell, batches, build, own_rows, start
from tests.world import pool

CELLS = [
    Cell(mesh="dp_shard=4"),
    Cell(mesh="dp_shard=4", zero=2, microbatches=2),
    Cell(mesh="dp_shard=4", zero=1, microbatches=3),
    Cell(mesh="dp_replicate=4", microbatches=2),
    Cell(mesh="dp_replicate=2 dp_shard=2", microbatches=2, tied=True),
    Cell(mesh="tp=4", tied=True),
    Cell(mesh="tp=4", sequence=True, qwen=True),
    Cell(mesh="tp=4", sequence=True, recompute="full", vocab=61, hidden_mlp=45, heads=(9, 3)),
    Cell(mesh="tp=4", sequence=False, recompute="full"),
    Cell(mesh="dp_shard=2 tp=2", sequence=True, recompute="selective", microbatches=2, zero=3, vocab=61),
    Cell(mesh="dp_shard=2 tp=2", sequence=False, recompute="full", microbatches=3, zero=1, qwen=True, tied=True),
    Cell(mesh="dp_replicate=2 tp=2", sequence=True, recompute="full", zero=2, documents=True),
    Cell(mesh="dp_shard=2 tp=2", sequence=True, dtype="float32", bf16=True, qwen=True, vocab=61),
    Cell(mesh="dp_replicate=2 dp_shard=2", dtype="float32", bf16=True, microbatches=2, zero=2),
    Cell(mesh="cp=4", microbatches=2, context=mk.ContextPolicy(scheme="ring")),
    Cell(mesh="cp=4", recompute="full", context=mk.ContextPolicy(scheme="all_gather"), heads=(9, 3)),
    Cell(mesh="cp=4", window=3, context=mk.ContextPolicy(scheme="group_cast"), zero=2),
    Cell(mesh="cp=4", documents=True, microbatches=2, recompute="selective"),
    Cell(mesh="dp_shard=2 cp=2", documents=True, context=mk.ContextPolicy(scheme="ulysses"), heads=(9, 3)),
    Cell(mesh="cp=4", context=mk.ContextPolicy(scheme="ring", ulysses=2), dtype="float32", bf16=True),
    Cell(mesh="dp_replicate=2 cp=2", context=mk.ContextPolicy(scheme="ulysses"), heads=(8, 1)),
    Cell(mesh="cp=2 tp=2", sequence=True, documents=True, recompute="full", heads=(9, 3), vocab=61),
    Cell(mesh="cp=2 tp=2", microbatches=2, tied=True),
    Cell(mesh="pp=4", layers=4, microbatches=3, tied=True),
    Cell(mesh="pp=2 dp_shard=2", layers=4, microbatches=2, schedule="zbv", tied=True),
    Cell(mesh="pp=2 dp_shard=2", layers=4, microbatches=2, schedule="interleaved", tied=True),
    Cell(mesh="pp=2 dp_replicate=2", layers=3, stages=(1, 2), dtype="float32", bf16=True, recompute="full"),
    Cell(mesh="pp=2 tp=2", layers=4, microbatches=2, sequence=True, recompute="full", qwen=True, schedule="zb-h1"),
    Cell(mesh="pp=2 tp=2", layers=4, microbatches=3, vocab=61, tied=True),
    Cell(mesh="pp=2 cp=2", layers=4, microbatches=2, documents=True, schedule="dualpipe-v"),
]


def observe_step(cell: Cell) -> tuple[Counter[Message], Counter[Message]]:
    run = start(cell)
    mesh = run.mesh
    local = own_rows(batches(cell)[0], mesh)
    with observe(mesh) as seen:
        run.forward_backward(local, microbatches=cell.microbatches)
        mk.clip_grad_norm(run, 1.0)
    place = {axis: mesh[axis].get_local_rank() for axis in ("pp", "dp_shard", "cp", "tp")}
    masks = [mk.Mask.from_positions(row.unsqueeze(0)) for row in local["position_ids"]] if cell.documents else None
    rows = local["labels"].shape[0]
    said = explain(
        run.whole,
        mesh.spec,
        **run.choices,
        rows=rows,
        seq_len=TOKENS,
        microbatches=cell.microbatches,
        mask=masks,
        coordinate=place,
    )
    return seen, said.messages


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_observed_collectives_are_the_explained_ones(cell: Cell) -> None:
    for seen, said in pool(4).run(observe_step, cell):
        assert seen, "a step on four ranks sends something"
        assert seen - said == Counter(), "sent, but not explained"
        assert said - seen == Counter(), "explained, but not sent"


def test_explaining_needs_no_ranks_and_no_memory() -> None:
    import torch

    with torch.device("meta"):
        model = build(Cell(mesh="tp=1"))
    said = explain(model, mk.MeshSpec(dp_shard=64, tp=8), plan=LLAMA_PLAN, rows=ROWS, seq_len=TOKENS, sequence=True)
    text = str(said)
    assert "layers.*.self_attn.q_proj.weight" in text
    assert "reduce_scatter" in text
