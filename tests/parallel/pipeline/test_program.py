"""Stages cut by the program on ranks: models whose stages exchange more than one hidden state equal one device."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import meshkit as mk
from meshkit.step import next_token_loss
from meshkit.strategy import PipelinePolicy
from tests.laws.parity.cases import mesh_for
from tests.world import RankError, pool, run_ranks
from tests.zoo import blocks, decoders, paths
from tests.zoo.decoders import Plain
from tests.zoo.shrink import VOCABULARY

TOL = 1e-10  # only the order of summation differs


class WritesIds(Plain):
    """In place, which its input is afterwards."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        input_ids.add_(1).remainder_(VOCABULARY)
        return super().forward(input_ids)


def built(name: str) -> nn.Module:
    module = next(module for module in (decoders, blocks, paths, sys.modules[__name__]) if hasattr(module, name))
    torch.manual_seed(0)
    model: Plain = getattr(module, name)()
    return model.double()


def batch(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (rows, tokens + 1), generator=torch.Generator().manual_seed(rows))
    return {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}


def worst(name: str, mesh: str, schedule: str) -> float:
    """The largest difference of a gradient from one device's, over batches of two shapes; then one of an evaluation."""
    run = mk.parallelize(built(name), mesh_for(mesh), pipeline=PipelinePolicy(schedule=schedule))
    alone, errors = built(name), []
    for rows, tokens in ((4, 8), (3, 12)):
        run.forward_backward(batch(rows, tokens), microbatches=2)
        (next_token_loss(alone, batch(rows, tokens)) / (rows * tokens)).backward()
        expected = dict(alone.named_parameters())
        for key, param in run.named_parameters():
            errors.append(float((param.grad - expected[key].grad).abs().max()))
    loss, count = run.evaluate(batch(rows, tokens))
    with torch.no_grad():
        errors.append(abs(float(loss - next_token_loss(alone.eval(), batch(rows, tokens)))) / int(count))
    return max(errors)


@pytest.mark.parametrize(
    ("name", "mesh", "schedule"),
    [
        ("SkipToEvery", "pp=2", "interleaved"),
        ("TwoStreams", "pp=2", "zbv"),
        ("EarlyExits", "pp=4", "1f1b"),
        ("SkipAsInUNet", "pp=2", "zb-h1"),
        ("InPlace", "pp=4", "1f1b"),
        ("DetachedHalf", "pp=2", "interleaved"),
        ("TupleBlocks", "pp=2", "zbv"),
        ("OnTokenCount", "pp=2", "1f1b"),
        ("WritesIds", "pp=2", "1f1b"),
        ("WritesIds", "pp=2", "zbv"),
    ],
)
def test_gradients_and_evaluation_equal_one_device(name: str, mesh: str, schedule: str) -> None:
    assert max(pool(int(mesh[-1])).run(worst, name, mesh, schedule)) <= TOL


def another_order() -> None:
    run = mk.parallelize(built("OnCount"), mesh_for("pp=2"))
    for _ in range(2):
        run.forward_backward(batch(4, 8), microbatches=2)


def test_a_forward_that_would_leave_the_order_that_was_read_is_refused() -> None:
    with pytest.raises(RankError, match="what runs next depends on 'calls', which each call changes"):
        run_ranks(2, another_order)
