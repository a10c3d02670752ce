"""Calls that are other than the one that was read: other stages were told of that, so they are refused in the step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.step import Batch
from tests.laws.parity.cases import mesh_for
from tests.world import RankError, pool
from tests.zoo.decoders import Plain


class Stepped(Plain):
    """From some step on, the embedding skips the blocks."""

    def forward(self, input_ids: Tensor, step: int = 0) -> Tensor:
        x = embedded = self.embed_tokens(input_ids)
        x = self.body(x)
        return self.lm_head(self.norm(x + embedded if step > 1 else x))


RETURNED = [1]


class Counts(nn.Module):
    """Returns a number beside its tensor, which the model multiplies by."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.block(x), RETURNED[0]


class Counted(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Counts, self.layers))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, number = layer(x)
            x = x * number
        return x


def batch() -> Batch:
    ids = torch.arange(64).reshape(2, 32) % 50 + 1
    return {"input_ids": ids, "labels": ids}


def loss_of_step(model: nn.Module, batch: Batch, *, step: int) -> Tensor:
    return mk.cross_entropy(model(batch["input_ids"], step=step), batch["labels"])


def calls_with_other_arguments() -> None:
    torch.manual_seed(0)
    run = mk.parallelize(Stepped(), mesh_for("pp=2"), microbatches=2)
    run.forward_backward(batch(), loss=partial(loss_of_step, step=0))
    run.forward_backward(batch(), loss=partial(loss_of_step, step=0))
    run.forward_backward(batch(), loss=partial(loss_of_step, step=2))


def returns_other_numbers() -> None:
    torch.manual_seed(0)
    run = mk.parallelize(Counted(), mesh_for("pp=2"), microbatches=2)
    run.forward_backward(batch())
    RETURNED[0] = 2
    try:
        run.forward_backward(batch())
    finally:
        RETURNED[0] = 1


def test_a_call_with_other_arguments_is_refused() -> None:
    with pytest.raises(RankError, match="called with 2, and 0 when it was read"):
        pool(2).run(calls_with_other_arguments)


def test_a_module_that_returns_another_number_is_refused() -> None:
    with pytest.raises(RankError, match=r"'layers\.\d' returned 2, and 1 when it was read"):
        pool(2).run(returns_other_numbers)
