"""Copies of experts that are expected are part of what is estimated and forecast before anything runs."""

from __future__ import annotations

import torch

import meshkit as mk
from meshkit.preflight.forecast import forecast
from meshkit.strategy import ExpertPolicy
from tests.laws.parity.cases import Cell, Moe, build, plan_of

CELL = Cell(mesh="dp_shard=4 ep=4", layers=3, moe=Moe(experts=8, hidden=256))
COPIES = ExpertPolicy(copies=2, expected=(1, 1, 1, 1, 1, 1, 30, 40), target=1.0)  # rank 0 gets two
EXPERT_BYTES = 3 * 256 * 32 * 8


def model() -> torch.nn.Module:
    with torch.device("meta"):
        return build(CELL)


def test_memory_of_copies_is_estimated() -> None:
    sizes = {"plan": plan_of(CELL), "rows": 2, "seq_len": 16}
    plain, copied = (
        mk.estimate(model(), CELL.mesh, experts=policy, **sizes).peak_bytes for policy in (ExpertPolicy(), COPIES)
    )
    # Weights of two copies and their gradients, at least; and with the messages they come in at most twice that.
    assert 4 * EXPERT_BYTES <= copied - plain <= 8 * EXPERT_BYTES


def test_messages_and_work_of_copies_are_forecast() -> None:
    strategies = [mk.Strategy(plan=plan_of(CELL), experts=policy) for policy in (ExpertPolicy(), COPIES)]
    plain, copied = (forecast(model().bfloat16(), each, "h100", spec=CELL.mesh) for each in strategies)
    assert copied.seconds > plain.seconds
