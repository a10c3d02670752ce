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
RESIDENT = {"optimizer": OptimizerPolicy(offload=OptimizerOffload(resident=0.5))}
DELAYED = {"optimizer": OptimizerPolicy(offload=OptimizerOffload(delayed=True))}
FEW_BITS = {"optimizer": OptimizerPolicy(states="8bit")}
ROUNDED = {"optimizer": OptimizerPolicy(states="4bit", stochastic_rounding=True)}
BF16, FP8 = {"precision": Precision()}, {"precision": Precision(fp8=mk.strategy.Fp8(emulate=True))}


def pipelined(schedule: str, mesh: str = "pp=2") -> Side:
    return Side(mesh=mesh, choices={"pipeline": mk.strategy.PipelinePolicy(schedule=schedule)})


DP, TP, PP, CP = (Side(mesh=f"{axis}=2") for axis in ("dp_shard", "tp", "pp", "cp"))
EP, ETP = Side(mesh="dp_shard=2 ep=2"), Side(mesh="tp=2 etp=2")
# Two ranks are enough for every kind of state; four for what shards a tensor over two axes.
PAIRS = [
    Pair(before=DP, after=TP, beside=True),
    Pair(before=TP, after=PP, beside=True, sizes="uneven"),
    Pair(before=PP, after=CP, model="tied"),
    Pair(before=CP, after=pipelined("zbv"), layers=4),
    Pair(before=pipelined("zbv"), after=DP, layers=5, sizes="uneven", beside=True),
    Pair(before=Side(mesh="dp_shard=2", choices={"zero": 1}), after=Side(mesh="dp_shard=2", choices={"zero": 3})),
    Pair(before=Side(mesh="dp_shard=2", choices={"zero": 2}), after=Side(mesh="dp_replicate=2"), sizes="uneven"),
    Pair(before=EP, after=ETP, model="mla", precision="fp32"),
    Pair(before=ETP, after=DP, model="moe", sizes="uneven", beside=True),
    Pair(before=PP, after=EP, model="mla"),
    Pair(before=DP, after=TP, model="lora"),
    Pair(before=PP, after=TP, model="transformers"),
    Pair(before=TP, after=DP, model="mlp"),
    Pair(before=Side(mesh="dp_shard=2", memory=BF16), after=Side(mesh="tp=2", memory=BF16), precision="fp32"),
    Pair(before=DP, after=Side(mesh="tp=2", memory=BF16 | {"recompute": "full"}), precision="fp32"),
    Pair(before=TP, after=Side(mesh="dp_shard=2", memory={"offload": mk.strategy.ActivationOffload()})),
    Pair(before=Side(mesh="dp_shard=2", memory=HOST), after=Side(mesh="tp=2", memory=HOST)),
    Pair(before=DP, after=Side(mesh="tp=2", memory=HOST), sizes="uneven"),
    Pair(before=Side(mesh="tp=2", memory=RESIDENT), after=PP),
    Pair(before=Side(mesh="dp_shard=2", memory=HOST), after=Side(mesh="pp=2", memory=RESIDENT), precision="bf16"),
    Pair(before=Side(mesh="tp=2", memory=DELAYED), after=Side(mesh="dp_shard=2", memory=HOST), precision="fp32"),
    Pair(before=Side(mesh="tp=2", memory=FEW_BITS), after=Side(mesh="dp_shard=2", memory=FEW_BITS), precision="fp32"),
    Pair(before=Side(mesh="pp=2", memory=ROUNDED), after=Side(mesh="tp=2", memory=ROUNDED), precision="bf16"),
    Pair(before=DP, after=PP, optimizer="sgd"),
    Pair(before=PP, after=TP, optimizer="torch adamw"),
    Pair(before=DP, after=TP, steps=0),  # without state
    Pair(before=Side(mesh="tp=2", memory=HOST), after=DP, steps=0),
    Pair(before=Side(mesh="dp_shard=2 tp=2"), after=Side(mesh="pp=2 dp_shard=2"), sizes="uneven"),
    Pair(before=pipelined("zbv", "pp=2 tp=2"), after=Side(mesh="dp_replicate=2 cp=2"), layers=4),
    Pair(before=Side(mesh="dp_shard=2 tp=2 ep=2 etp=2"), after=Side(mesh="pp=2 dp_shard=2 ep=2"), model="moe"),
    Pair(before=Side(mesh="dp_replicate=2 dp_shard=2"), after=Side(mesh="tp=4"), model="tied", sizes="uneven"),
    Pair(before=Side(mesh="dp_shard=2", memory=FP8), after=Side(mesh="tp=2", memory=BF16), precision="fp32"),
    Pair(before=Side(mesh="dp_shard=3"), after=Side(mesh="tp=3"), sizes="uneven"),
]


@pytest.mark.parametrize("pair", thin(PAIRS, 2), ids=str)
def test_moving_equals_saving_and_loading(tmp_path: Path, pair: Pair) -> None:
    for told in pool(pair.ranks).run(compare, pair, str(tmp_path)):
        assert not told.at_once
        assert not told.later
        assert told.sent == told.planned
        assert told.total == told.least
        if pair.beside:
            assert told.losses == pytest.approx(told.unmoved, abs=TOL_FP64)
