"""Pairs on a mesh: the loss of one device, and each value of each pair once, however rows and tokens are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshkit as mk
from meshkit.data import Example, ExampleLoader, Pair
from meshkit.step import next_token_loss
from tests.laws.parity.cases import Cell, build, mesh_for, plan_of
from tests.world import pool

TOL_FP64_SUM = 1e-10  # only summation order differs
PAIRS, SEQ_LEN, VOCAB = 5, 40, 64
STEPS = 2


def pairs() -> list[Pair]:
    draw = np.random.default_rng(0)

    def side(number: int, length: int, worth: float) -> Example:
        return Example(
            ids=draw.integers(0, VOCAB, length),
            learn=np.arange(length) >= length // 2,
            token_values={"reward": np.full(length, worth)},
            scalars={"which": number + worth},
        )

    return [Pair(side(i, 3 + 2 * i, 0.25), side(i, 12 - 2 * i, 0.5)) for i in range(PAIRS)]


def steps_on(spec: str, packing: Any, microbatches: int) -> list[tuple[float, list[tuple[float, float, float, float]]]]:
    """Of each step: the loss, and (which, rewards, ends, labels) summed by segment, of this rank's data."""
    cell = Cell(mesh=spec, vocab=VOCAB, layers=2)
    mesh = mesh_for(spec)
    run = mk.parallelize(build(cell), mesh, plan=plan_of(cell))
    loader = ExampleLoader(
        pairs(), seq_len=SEQ_LEN, global_batch=3, seed=0, packing=packing, rank=mesh.data_rank, ranks=mesh.data_ranks
    )
    found = []
    for _, batch in zip(range(STEPS), loader, strict=False):
        sums = torch.zeros(4, 2 * PAIRS + 1, dtype=torch.float64)

        def loss(model: nn.Module, part: dict[str, Tensor], sums: Tensor = sums) -> Tensor:
            learnt = (part["labels"] != -100).double()
            values = (part["which"], part["reward"] * learnt, part["ends"].double(), learnt)
            for row, value in enumerate(values):
                sums[row].index_add_(0, part["segment_ids"].flatten(), value.flatten().double())
            return next_token_loss(model, part)

        total = float(run.forward_backward(batch, microbatches=microbatches, loss=mk.step.additive(loss)))
        if mesh.spec.cp > 1:
            dist.all_reduce(sums, group=mesh["cp"].get_group())
        segments = int(batch["ends"].sum())
        found.append((total, [tuple(sums[:, i].tolist()) for i in range(1, segments + 1)]))
    return found


@pytest.mark.parametrize("packing", ["rows", "step", "balanced", "none"])
def test_every_mesh_sees_each_pair_once_and_has_the_loss_of_one_device(packing: str) -> None:
    (expected,) = pool(1).run(steps_on, "dp_shard=1", packing, 1)
    for _, segments in expected:
        assert len(segments) >= 6
        for chosen, rejected in zip(segments[::2], segments[1::2], strict=True):
            number = int(chosen[0])
            assert chosen[0] == number + 0.25
            assert rejected[0] == number + 0.5
            for side, worth, length in ((chosen, 0.25, 3 + 2 * number), (rejected, 0.5, 12 - 2 * number)):
                learnt = length - length // 2
                assert side[1:] == (worth * learnt, 1.0, learnt)
    for spec, microbatches in (("dp_shard=2 cp=2", 2), ("dp_shard=4", 1)):
        ranks = pool(4).run(steps_on, spec, packing, microbatches)
        for step in range(STEPS):
            assert [result[step][0] for result in ranks] == pytest.approx([expected[step][0]] * 4, abs=TOL_FP64_SUM)
            distinct = {segment for result in ranks for segment in result[step][1]}
            assert distinct == set(expected[step][1])
