"""A delayed update is AdamW on gradients one step late, exactly, and a checkpoint does not lose it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import meshkit as mk
from meshkit.core.sharding import local_tensor
from meshkit.optim import OffloadedAdamW
from meshkit.strategy import OptimizerOffload, OptimizerPolicy
from tests.laws.parity.cases import MAX_NORM, Cell, batches, own_rows, start
from tests.optim.test_host_offload import backward, net, resume, save_half_way
from tests.world import pool

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
DELAYED = mk.MemoryPolicy(optimizer=OptimizerPolicy(offload=OptimizerOffload(delayed=True)))


def oracle(dtype: torch.dtype, steps: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """(parameters that forward n sees, those after the last update): theta_n from theta_{n-1} with the gradient at
    theta_{n-2}, by a resident optimizer and a second model that is shown older parameters.
    """
    newest, model = net(dtype), net(dtype)
    masters = [param.detach().float().requires_grad_() for param in newest.parameters()]
    optimizer = torch.optim.AdamW(masters, **OPTIONS, fused=True)  # type: ignore[arg-type]
    history = [[param.detach().clone() for param in newest.parameters()]]
    seen = []
    for step in range(steps):
        shown = history[max(0, step - 1)]
        with torch.no_grad():
            for param, value in zip(model.parameters(), shown, strict=True):
                param.copy_(value)
        seen.append(shown)
        backward(model, step)
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        history.append([master.detach().to(dtype, copy=True) for master in masters])
    return seen, history[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_those_of_an_oracle_with_gradients_one_step_late(dtype: torch.dtype) -> None:
    seen, last = oracle(dtype, 6)
    model = net(dtype)
    optimizer = OffloadedAdamW(model.parameters(), **OPTIONS, delayed=True)  # type: ignore[arg-type]
    for step in range(6):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), seen[step], strict=True)), step
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), last, strict=True))
    optimizer.finish()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), last, strict=True))


def test_a_write_while_an_update_is_pending_is_refused() -> None:
    model = net()
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, delayed=True)
    backward(model, 0)
    optimizer.step()
    with torch.no_grad():
        model.first.weight.zero_()
    with pytest.raises(mk.errors.StepError, match="a parameter was changed while an update was pending"):
        optimizer.finish()


def on_a_mesh(cell: Cell) -> tuple[float, float]:
    """(largest difference from one step late by hand, largest difference from not late)."""
    by_hand, late, prompt = start(cell), start(replace(cell, memory=DELAYED)), start(cell)
    updating = start(cell)  # holds theta_{n-1}, and is given gradients from `by_hand`
    optimizers = [mk.adamw(run, lr=1e-2) for run in (updating, late, prompt)]
    history = [[local_tensor(param).clone() for param in updating.parameters()]]
    for step, batch in enumerate(batches(cell)):
        for param, value in zip(by_hand.parameters(), history[max(0, step - 1)], strict=True):
            local_tensor(param).copy_(value)
        for run in (by_hand, late, prompt):
            run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches)
            mk.clip_grad_norm(run, MAX_NORM)
        for mine, its in zip(updating.parameters(), by_hand.parameters(), strict=True):
            mine.grad, its.grad = its.grad, None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        history.append([local_tensor(param).clone() for param in updating.parameters()])
    assert isinstance(optimizers[1], OffloadedAdamW)
    optimizers[1].finish()
    differences = []
    for expected in (updating, prompt):
        pairs = zip(late.parameters(), expected.parameters(), strict=True)
        differences.append(max(float((local_tensor(a) - local_tensor(b)).abs().max()) for a, b in pairs))
    return differences[0], differences[1]


def test_the_same_on_a_mesh_with_clipping_and_accumulation() -> None:
    for late, prompt in pool(2).run(on_a_mesh, Cell(mesh="dp_shard=2", microbatches=2, layers=1)):
        assert late == 0 and prompt > 1e-6


def test_a_save_applies_the_pending_update_and_resuming_is_going_on(tmp_path: Path) -> None:
    cell = Cell(mesh="dp_shard=2", microbatches=2, memory=DELAYED)
    (saved, later), *_ = pool(2).run(save_half_way, str(tmp_path), cell)
    for loaded, resumed in pool(2).run(resume, str(tmp_path), cell):
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert all(torch.equal(resumed[name], later[name]) for name in later)
