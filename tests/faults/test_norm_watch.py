"""A rank whose share of the squared gradient norm leaves its median is named, with its step; what all ranks share is not."""

from __future__ import annotations

import torch

import meshkit as mk
from meshkit.core.sharding import local_tensor
from meshkit.faults import CorruptionGuard
from meshkit.faults.norm_watch import first_outlier
from meshkit.step import grad_norm
from tests.laws.parity.cases import Cell, batches, own_rows, start
from tests.world import pool


def test_odds_beyond_a_hundred_medians_are_named_once_ten_steps_are_known() -> None:
    usual = torch.tensor([[1.0, 1.0, 0.5]]).repeat(10, 1)
    new = torch.tensor([[0.9, 1.2, 0.4], [0.01, 0.01, 60.0]])
    assert first_outlier(usual, new) == (1, 2, 0.5)
    assert first_outlier(usual, new[:1]) is None
    assert first_outlier(usual[:3], new) is None


def test_a_rank_that_usually_has_no_gradient_has_no_usual_share_and_steps_without_one_are_left_out() -> None:
    usual = torch.tensor([[1.0, 0.0, 0.5]]).repeat(10, 1)
    assert (
        first_outlier(usual, torch.tensor([[1.0, 0.01, 0.5]])) is None
    )  # its first rows, or the first tokens of an expert
    empty = torch.full((1, 3), torch.nan)  # 0 over 0: a batch without tokens
    assert first_outlier(usual, torch.cat([empty, torch.tensor([[0.01, 0.0, 60.0]])])) == (1, 2, 0.5)


def watched(cell: Cell, odd_at: int, ranks: tuple[int, ...]) -> list[str]:
    run = start(cell)
    optimizer = mk.adamw(run, lr=1e-3)
    rows = own_rows(batches(cell)[0], run.mesh)
    said = []
    with CorruptionGuard(run, optimizer, every_steps=5) as guard:
        for step in range(1, 21):
            optimizer.zero_grad()
            run.forward_backward(rows)
            if step == odd_at and run.mesh.rank in ranks:
                for param in run.parameters():
                    local_tensor(param.grad).mul_(1e3)
            mk.clip_grad_norm(run, 1.0)
            optimizer.step()
            guard.check(step)
            if step % 5 == 0 and guard.outlier is not None:
                said.append(str(guard.outlier))
    return said


def test_a_rank_with_an_odd_gradient_is_named_and_one_of_all_ranks_is_not() -> None:
    cell = Cell(mesh="dp_shard=2")
    first, second = pool(2).run(watched, cell, 13, (1,))
    assert first == second and len(first) == 1
    assert "step 13: rank 1 on " in first[0] and "of the squared gradient norm of all ranks, and usually" in first[0]
    assert pool(2).run(watched, cell, 13, (0, 1)) == [[], []]


def with_a_stage_without_gradients(odd_at: int) -> list[str]:
    cell = Cell(mesh="pp=2 dp_shard=2", zero=1, microbatches=2)
    run = start(cell)
    optimizer = mk.adamw(run, lr=1e-3)
    rows = own_rows(batches(cell)[0], run.mesh)
    said = []
    with CorruptionGuard(run, optimizer, every_steps=3) as guard:
        for step in range(1, 19):
            optimizer.zero_grad()
            run.forward_backward(rows, microbatches=2)
            for param in run.parameters():
                if run.mesh.rank >= 2:  # the second stage, whose loop leaves it as it is
                    param.grad = None
                elif step == odd_at and run.mesh.rank == 1:
                    local_tensor(param.grad).mul_(1e3)
            grad_norm(run)  # for a log: the same step
            mk.clip_grad_norm(run, 1.0)
            optimizer.step()
            guard.check(step)
            if step % 3 == 0 and guard.outlier is not None:
                said.append(str(guard.outlier))
    return said


def test_ranks_without_a_gradient_take_part_and_a_norm_that_is_asked_twice_is_one_step() -> None:
    told = pool(4).run(with_a_stage_without_gradients, 14, timeout_s=120.0)
    assert all(each == told[0] for each in told) and len(told[0]) == 1, told
    assert told[0][0].startswith("step 14: rank 1 on "), told
