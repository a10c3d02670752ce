"""bf16 compute over fp32 masters: on a mesh it is as near to fp64 as on one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import meshkit as mk
from meshkit.core.sharding import full_tensor
from tests.depth import thin
from tests.laws.parity.cases import Cell, Moe, batches, own_rows, reference, start
from tests.world import pool

BF16_RATIO = 2.0  # law 1: at most twice the error of one bf16 device


def gradients(cell: Cell) -> dict[str, Tensor]:
    run = start(cell)
    run.forward_backward(own_rows(batches(cell)[0], run.mesh), microbatches=cell.microbatches)
    optimizer = mk.adamw(run, lr=1e-2)
    optimizer.step()
    assert all(param.dtype == torch.float32 for param in run.parameters())
    assert all(state["exp_avg"].dtype == torch.float32 for state in optimizer.state.values())
    return {name: full_tensor(param.grad).double() for name, param in run.named_parameters()}


def errors(cell: Cell) -> dict[str, float]:
    exact = reference(Cell(**{**vars(cell), "dtype": "float64", "bf16": False}))[2]
    return {name: float((grad - exact[name]).norm() / exact[name].norm()) for name, grad in gradients(cell).items()}


@pytest.mark.parametrize(
    "cell",
    thin(
        [
            Cell(mesh="dp_shard=4", dtype="float32", bf16=True, microbatches=2),
            Cell(mesh="tp=4", dtype="float32", bf16=True, sequence=True, recompute="selective"),
            Cell(mesh="dp_shard=2 tp=2", dtype="float32", bf16=True, zero=1, tied=True, vocab=61, recompute="full"),
            Cell(mesh="dp_replicate=2 tp=2", dtype="float32", bf16=True, sequence=True, qwen=True, documents=True),
            Cell(mesh="dp_shard=4 ep=2", dtype="float32", bf16=True, layers=3, moe=Moe(chosen=6, shared=24)),
            Cell(mesh="tp=4 ep=2 etp=2", dtype="float32", bf16=True, layers=3, moe=Moe(chosen=6), recompute="full"),
            Cell(
                mesh="dp_replicate=2 tp=2 ep=2", dtype="float32", bf16=True, layers=3, moe=Moe(chosen=6), sequence=True
            ),
        ],
        2,
    ),
    ids=str,
)
def test_bf16_on_a_mesh_is_as_exact_as_on_one_device(cell: Cell) -> None:
    alone = pool(1).run(errors, Cell(**{**vars(cell), "mesh": "tp=1", "sequence": False, "microbatches": 1}))[0]
    assert max(alone.values()) > 1e-4, "bf16 was not used"
    for meshed in pool(4).run(errors, cell):
        mean = sum(meshed.values()) / sum(alone.values())
        assert mean <= BF16_RATIO, mean
        worst = max(meshed, key=lambda name: meshed[name] / alone[name])
        assert meshed[worst] <= BF16_RATIO * max(alone[worst], max(alone.values()) / 2), worst
