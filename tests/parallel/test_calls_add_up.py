"""Gradients of several calls of forward_backward add up, as those of several backwards do on one device."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

import meshkit as mk
from meshkit.core.gradient import gradient_of
from meshkit.core.model_state import copies_of
from meshkit.strategy import DataPolicy
from tests.compare_shards import difference
from tests.laws.parity.cases import Cell, Moe, batches, build, own_rows, start
from tests.world import pool

TOL_FP64 = 1e-10  # only the order of summation differs

CELLS = [
    Cell(mesh="pp=2", tied=True),
    Cell(mesh="pp=2", tied=True, schedule="zbv", layers=4, microbatches=2),
    Cell(mesh="pp=2 dp_shard=2", tied=True, microbatches=3),
    Cell(mesh="pp=2 tp=2", tied=True, sequence=True),
    Cell(mesh="pp=2 cp=2", tied=True, schedule="zb-h1", microbatches=2),
    Cell(mesh="dp_shard=2", zero=1, microbatches=2),
    Cell(mesh="dp_shard=2", zero=2, tied=True),
    Cell(mesh="dp_replicate=2 dp_shard=2", microbatches=2, vocab=61),
    Cell(mesh="dp_shard=2x2", data=DataPolicy(parameters="node", gradients="none"), microbatches=2),
    Cell(mesh="tp=2", sequence=True, qwen=True, tied=True),
    Cell(mesh="cp=2 tp=2", sequence=True, documents=True),
    Cell(mesh="dp_shard=2 ep=2", moe=Moe(experts=8)),
    Cell(mesh="dp_shard=2 tp=2 ep=4", moe=Moe(experts=8), sequence=True, microbatches=2),
]


def after_three_calls(cell: Cell) -> dict[str, float]:
    """Differences from one device, of gradients that no call has zeroed."""
    run, one, routers = start(cell), build(cell), mk.moe.aux_loss
    copies = copies_of(run.model)
    for batch in batches(cell):
        run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches)
        extra = {"position_ids": batch["position_ids"]} if cell.documents else {}
        with routers.collect() as found:
            logits = one(batch["input_ids"], **extra)
        mean = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        (mean + found.total() / (batch["labels"] != -100).sum()).backward()
    wanted = dict(one.named_parameters())
    return {
        name: difference(gradient_of(param), wanted[copies.get(name, name)].grad)
        for name, param in run.named_parameters()
    }


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_gradients_of_calls_add_up(cell: Cell) -> None:
    for found in pool(mk.mesh.MeshSpec.parse(cell.mesh).world_size).run(after_three_calls, cell):
        assert max(found.values()) <= TOL_FP64, max(found.items(), key=lambda item: item[1])
