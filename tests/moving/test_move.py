"""A run that moves to another strategy is, bit for bit, the run that was saved and loaded there."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshkit as mk
from meshkit.strategy import OptimizerOffload, OptimizerPolicy, Precision
from tests.depth import thin
from tests.moving.cases import TOL_FP64, Pair, Side, compare
from tests.world import pool

HOST = {"optimizer": OptimizerPolicy(offload=OptimizerOffload())}
EIGHT_BITS = {"optimizer": OptimizerPolicy(states="8bit")}
DP, TP, PP, CP = Side(mesh="dp_shard=2"), Side(mesh="tp=2"), Side(mesh="pp=2"), Side(mesh="cp=2")
ZBV = Side(mesh="pp=2", choices={"pipeline": mk.strategy.PipelinePolicy(schedule="zbv")})
EP = Side(mesh="dp_shard=2 ep=2")
ETP = Side(mesh="dp_shard=2 ep=1 etp=2")
PAIRS = [
    Pair(before=DP, after=TP),
    Pair(before=TP, after=PP),
    Pair(before=PP, after=CP),
    Pair(before=CP, after=ZBV),
    Pair(before=ZBV, after=DP),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_moving_equals_saving_and_loading(tmp_path: Path, pair: Pair) -> None:
    for told in pool(pair.ranks).run(compare, pair, str(tmp_path)):
        assert not told.at_once
        assert not told.later
        assert told.sent == told.planned
        assert told.total == told.least
        if pair.precision == "fp64":
            assert told.losses == pytest.approx(told.unmoved, abs=TOL_FP64)
