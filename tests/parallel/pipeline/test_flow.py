"""What crosses the cuts of a staged model, read from its program: the analysis alone, without ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshkit.errors import PlanError
from meshkit.parallel.pipeline import plan_pipeline
from meshkit.parallel.pipeline._stages import flow_of
from meshkit.program import Example, example_of, trace
from tests.zoo import blocks, counted, decoders, paths
from tests.zoo.decoders import LAYERS, WIDTH, Block, Plain

BLOCKS = [f"layers.{index}" for index in range(LAYERS)]


def crossing(model: nn.Module, stages: int = 2) -> list[list[tuple[str, int]]]:
    """For each cut: (module, leaf of its output) of what crosses it."""
    cut, example = plan_pipeline(model, stages, blocks=BLOCKS, schedule="1f1b"), example_of(model)
    assert example is not None
    flow = flow_of(trace(model, example.args, example.kwargs), model, cut.stages)
    return [[(flow.calls[value.call].name, value.leaf) for value in cut] for cut in flow.cuts]


LAST = [[("layers.1", 0)]]


ONE = (
    "Plain ScaledHead SoftCap LogSoftmax CentredLogits Tied TwoHeads ReturnsObject TanhBetween BareNorms EachTwice InPlace "
    "Checkpointed GradientHook LastUnused"
)


@pytest.mark.parametrize("name", re.findall(r"\w+", ONE))
def test_one_hidden_state_crosses_whatever_lies_around_and_between_blocks(name: str) -> None:
    assert crossing(getattr(decoders, name)()) == LAST


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("SkipToHead", ["embed_tokens", "layers.1"]),
        ("SkipToEvery", ["embed_tokens", "layers.1"]),
        ("SkipAsInUNet", ["layers.0", "layers.1"]),
        ("TwoStreams", ["embed_tokens", "layers.0", "layers.1"]),
        ("EarlyExits", ["layers.0", "layers.1"]),
    ],
)
def test_what_later_stages_need_crosses(name: str, wanted: list[str]) -> None:
    (cut,) = crossing(getattr(decoders, name)())
    assert [module for module, _ in cut] == wanted


def test_what_a_later_stage_needs_is_handed_on_by_those_between() -> None:
    cuts = crossing(decoders.SkipToHead(), stages=4)
    assert cuts == [[("embed_tokens", 0), (f"layers.{cut}", 0)] for cut in range(3)]


def test_tuples_and_modules_registered_in_another_order_than_called() -> None:
    assert crossing(blocks.TupleBlocks()) == [[("layers.1", 0), ("layers.1", 1)]]
    stages = plan_pipeline(blocks.LearnedPositions(), 2, blocks=BLOCKS, schedule="1f1b").stages
    assert set(stages.head) == {"embed_tokens", "positions"}


class Projected(Plain):
    """A linear layer between two blocks."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.project, self.after = nn.Linear(WIDTH, WIDTH), after

    def body(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == self.after:
                x = self.project(x)
        return x


@pytest.mark.parametrize(("after", "stage"), [(0, 0), (1, 0), (2, 1)])
def test_a_module_between_blocks_belongs_to_the_stage_of_the_block_before(after: int, stage: int) -> None:
    stages = plan_pipeline(Projected(after), 2, blocks=BLOCKS, schedule="1f1b").stages
    assert stages.stage_of("project.weight") == stage


# ------------------------------------------------------------------------------------------------------------------ refusals


class ByAttribute(Plain):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            self.kept = out * 2
            return out

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) + self.layers[0].kept


class Random(Plain):
    def body(self, x: Tensor) -> Tensor:
        return super().body(noise := torch.randn_like(x) + x) + noise


class Own(Plain):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return super().forward(x)

    def body(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        return super().body(x) + x


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (decoders.Repeated, r"'layers.0' of stage 0 needs what 'layers.3' of stage 1 returns, which runs after it"),
        (decoders.OneNorm, r"'layers.1' of stage 0 needs what 'norm' of stage 1 returns, which runs after it"),
        (decoders.HeadByWeight, r"mm.default at decoders.py:\d+ .* reads 'embed_tokens.weight' outside of the module"),
        (decoders.ScalarForEach, r"mul.Tensor at decoders.py:\d+ .* reads 'scales.0' outside of the module"),
        (
            ByAttribute,
            r"reads a tensor that aten.mul.Tensor at test_flow.py:\d+ of 'layers.0' makes in 'layers.0' of stage 0",
        ),
        (
            Random,
            r"aten.randn_like.default at test_flow.py:\d+ of 'the model' draws random numbers that stages 0 and 1 both",
        ),
        (Own, r"aten.add_.Tensor at test_flow.py:\d+ of 'layers.0' in 'layers.0' of stage 0 changes in place"),
        (blocks.NestedBlocks, r"'layers.0.0' is called by 'the model' and not by 'layers.0', of which it is a part"),
        (
            counted.Penalised,
            r"at counted.py:\d+ of 'the model' reads '.*' outside .* penalty on weights is the optimizer's",
        ),
        (counted.PenalisedBlocks, r"at counted.py:\d+ of 'the model' reads 'layers.3.mlp.down.bias' outside of"),
        (counted.PenalisedHead, r"at counted.py:\d+ of 'the model' reads 'lm_head.weight' outside of"),
        (counted.PenalisedByName, r"norm.* at counted.py:\d+ of 'the model' reads 'layers.0.mlp.up.weight' outside of"),
        (counted.PenalisedByState, r"norm.* at counted.py:\d+ of 'the model' reads '.*' outside of"),
        (counted.PenaltyKept, r"at counted.py:\d+ of 'the model' reads 'lm_head.weight' outside of"),
        (paths.OnValue, r"what runs next depends on a tensor's values"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_cut_is_refused_when_it_is_planned(make: Any, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        crossing(make())


def test_a_model_of_another_input_is_read_by_its_example() -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leave = nn.Linear(8, 2)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, features: Tensor) -> Tensor:
            x = features
            for layer in self.layers:
                x = F.relu(layer(x))
            return self.leave(x)

    without = plan_pipeline(Features(), 2, blocks=BLOCKS, schedule="1f1b", split=[2, 2])
    assert not without.read and without.stages.head == ("leave",)
    cut = plan_pipeline(
        Features(), 2, blocks=BLOCKS, schedule="1f1b", split=[2, 2], example=Example((torch.zeros(4, 8),))
    )
    assert cut.stages.tail == ("leave",)
    assert cut.read
