"""On every kind of mesh: offload changes no bit of a gradient, and training equals one device."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import meshkit as mk
from meshkit.core.sharding import local_tensor
from tests.depth import thin
from tests.laws.parity.cases import Cell, Moe, batches, own_rows, run_cell, start
from tests.world import pool

TOL_FP64 = 1e-10  # only the order of summation differs


def memory(recompute: Any = "none", *, bf16: bool = False, **offload: Any) -> mk.MemoryPolicy:
    policy = mk.strategy.ActivationOffload(**{"min_bytes": 1, **offload})
    return mk.MemoryPolicy(recompute=recompute, offload=policy, precision=mk.strategy.Precision() if bf16 else None)


def differences(cell: Cell) -> tuple[list[str], int, int]:
    """(parameters whose gradient offload changes, stored and fetched bytes of the step)"""
    assert cell.memory is not None
    grads, steps = [], []
    for each in (cell, replace(cell, memory=replace(cell.memory, offload=None))):
        run = start(each)
        run.forward_backward(own_rows(batches(cell)[0], run.mesh), microbatches=cell.microbatches)
        grads.append({name: local_tensor(param.grad) for name, param in run.named_parameters()})
        steps.append(run.offload)
    assert steps[1] is None and steps[0] is not None
    step = steps[0].last_step
    assert not steps[0]._saved
    return (
        [name for name, grad in grads[0].items() if not torch.equal(grad, grads[1][name])],
        step.stored_bytes,
        step.fetched_bytes + step.forwarded_bytes,
    )


CELLS = [
    Cell(mesh="dp_shard=2", zero=3, microbatches=2, memory=memory(keep_last=0)),
    Cell(mesh="dp_shard=2", zero=2, microbatches=2, memory=memory(to="disk")),
    Cell(mesh="dp_shard=2", zero=1, microbatches=3, memory=memory("full", keep_last=0)),
    Cell(mesh="dp_shard=2", dtype="float32", tied=True, vocab=61, memory=memory("selective", bf16=True, keep_last=0)),
    Cell(mesh="tp=2", sequence=True, qwen=True, memory=memory(keep_last=0)),
    Cell(mesh="tp=2", sequence=True, memory=memory("selective", to="disk", keep_last=0)),
    Cell(mesh="tp=2", hidden_mlp=45, heads=(9, 3), memory=memory("full")),
    Cell(mesh="cp=2", documents=True, memory=memory(keep_last=0)),
    Cell(mesh="cp=2", window=5, memory=memory("selective", keep_last=0)),
    Cell(mesh="pp=2", microbatches=3, layers=4, memory=memory()),
    Cell(mesh="pp=2", microbatches=3, layers=4, schedule="zb-h1", memory=memory("full", to="disk")),
    Cell(mesh="pp=2", microbatches=4, layers=8, schedule="zbv", documents=True, memory=memory(keep_last=0, ahead=2)),
    Cell(mesh="dp_shard=2 ep=2", layers=3, microbatches=2, moe=Moe(shared=24, balance=0.1), memory=memory(keep_last=0)),
    Cell(mesh="dp_shard=2 ep=2", layers=3, moe=Moe(z=0.1), memory=memory("full", to="disk", keep_last=0)),
    Cell(mesh="dp_shard=2 ep=2", layers=3, moe=Moe(), memory=memory("selective", keep_last=0)),
]


@pytest.mark.parametrize(
    "cell", thin(CELLS, 2), ids=lambda cell: f"{cell.mesh}-{cell.memory.recompute}-{cell.schedule}"
)
def test_no_bit_changes(cell: Cell) -> None:
    found = pool(2).run(differences, cell)
    assert any(stored for _, stored, _ in found)
    for changed, stored, back in found:
        assert not changed
        assert back <= stored  # less where backward does not need all


@pytest.mark.parametrize(
    "cell",
    [
        Cell(mesh="dp_shard=2 tp=2", sequence=True, microbatches=2, memory=memory("full", keep_last=0)),
        Cell(mesh="pp=2 dp_shard=2", layers=4, microbatches=3, memory=memory(to="disk", keep_last=0)),
        Cell(mesh="cp=2 tp=2", documents=True, memory=memory("selective", keep_last=0)),
        Cell(mesh="dp_replicate=2 dp_shard=2 ep=2", layers=3, moe=Moe(balance=0.1), memory=memory(keep_last=0)),
    ],
    ids=lambda cell: cell.mesh,
)
def test_training_equals_one_device(cell: Cell) -> None:
    for outcome in pool(4).run(run_cell, cell):
        assert max(outcome.loss, outcome.norm, outcome.gradient, outcome.parameter) <= TOL_FP64, outcome


def stored(cell: Cell) -> int:
    """Bytes that one row moves."""
    run = start(cell)
    run.forward_backward({name: tensor[:1] for name, tensor in batches(cell)[0].items()})
    assert run.offload is not None
    return run.offload.last_step.stored_bytes


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gathered_parameters_are_never_moved(zero: int) -> None:
    cell = Cell(mesh="dp_shard=1", layers=3, memory=memory(keep_last=0))
    (expected,) = pool(1).run(stored, cell)
    assert pool(2).run(stored, replace(cell, mesh="dp_shard=2", zero=zero)) == [expected, expected]


def compiled_differences(cell: Cell) -> tuple[list[str], int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing probes attributes, .grad of non-leaves for one, that warn
        return differences(cell)


def test_around_compiled_blocks() -> None:
    for recompute in ("none", "full"):
        cell = Cell(mesh="dp_shard=2", compile="aot_eager", memory=memory(recompute, keep_last=0))
        for changed, stored, _ in pool(2).run(compiled_differences, cell, timeout_s=240):
            assert not changed and stored
