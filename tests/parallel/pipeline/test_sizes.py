"""Stages for batches of many sizes: read three times, then told; who follows sizes otherwise is read again or refused."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

import meshkit as mk
from meshkit.parallel.pipeline import _reading
from meshkit.step import next_token_loss
from tests.laws.parity.cases import mesh_for
from tests.world import RankError, pool, run_ranks
from tests.zoo.decoders import Plain
from tests.zoo.shrink import VOCABULARY

TOL = 1e-10  # only the order of summation differs
SIZES = [(2, 12), (2, 7), (2, 15), (2, 9), (2, 16), (1, 10), (1, 5), (2, 13), (1, 9), (2, 12)]


class PaddedInside(Plain):
    """Hands on rows that it has padded to a multiple of 8."""

    def forward(self, input_ids: Tensor) -> Tensor:
        tokens = input_ids.shape[1]
        x = nn.functional.pad(self.embed_tokens(input_ids), (0, 0, 0, -tokens % 8))
        return self.lm_head(self.norm(self.body(x))[:, :tokens])


class OtherWayForLongRows(Plain):
    """Adds the embedding again where rows are long."""

    def forward(self, input_ids: Tensor) -> Tensor:
        first = self.embed_tokens(input_ids)
        x = self.body(first)
        return self.lm_head(self.norm(x + first if input_ids.shape[1] > 10 else x))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


MODELS = {"llama": llama, "plain": Plain, "padded": PaddedInside, "long": OtherWayForLongRows}


def steps(name: str, sizes: list[tuple[int, int]]) -> tuple[float, int]:
    """(the largest difference of a gradient from one device's, how often the model was read in steps)."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    torch.manual_seed(0)
    alone = MODELS[name]().double()
    run = mk.parallelize(model, mesh_for("pp=2"))
    errors = []
    with mock.patch.object(_reading, "trace", wraps=_reading.trace) as read:
        for rows, tokens in sizes:
            ids = torch.randint(VOCABULARY, (rows, tokens + 1), generator=torch.Generator().manual_seed(tokens))
            batch = {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}
            run.forward_backward(batch, microbatches=1)
            (next_token_loss(alone, batch) / (rows * tokens)).backward()
            expected = dict(alone.named_parameters())
            errors += [float((param.grad - expected[key].grad).abs().max()) for key, param in run.named_parameters()]
    return max(errors), read.call_count


@pytest.mark.parametrize("name", ["llama", "plain"])
def test_rows_of_every_length_equal_one_device_and_are_read_four_times(name: str) -> None:
    found = pool(2).run(steps, name, SIZES)
    assert max(error for error, _ in found) < TOL
    assert (
        sum(readings for _, readings in found) == 4
    )  # by one rank for both: three lengths, and another number of rows


def test_sizes_that_do_not_tell_are_read_each_time() -> None:
    found = pool(2).run(steps, "padded", SIZES)
    assert max(error for error, _ in found) < TOL
    assert sum(readings for _, readings in found) == len(set(SIZES))


def test_a_stage_that_hands_on_something_else_than_was_told_is_refused() -> None:
    with pytest.raises(RankError, match=r"StepError: pipeline: 'layers.1' returned \[2, 16, \d+\]"):
        run_ranks(2, steps, "padded", [(2, 8), (2, 16), (2, 24), (2, 9)])


def test_another_way_for_rows_of_other_lengths_is_refused() -> None:
    with pytest.raises(RankError, match="StepError|PlanError"):
        run_ranks(2, steps, "long", [(2, 8), (2, 7), (2, 6), (2, 12)])
