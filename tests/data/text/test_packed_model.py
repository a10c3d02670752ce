"""What a model makes of packed rows is what it makes of each example alone, and no other example has a part in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshkit.data import Example, build_rows, first_fit_decreasing
from meshkit.models.llama import Llama
from tests.tiny import tiny_config

# Of logits about 1. A product of few rows is summed in another order than the same rows among others: MKL takes four rows at
# a time, and has another kernel for what is left over. No packing can change that, so one example by itself is compared so.
TOL_FP64_SUM = 1e-14
LENGTHS = (5, 9, 3, 12, 7, 1, 14)


@pytest.fixture(scope="module")
def model() -> Llama:
    config = tiny_config(vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=8)
    model = Llama(config).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    draw = np.random.default_rng(0)
    return [Example(ids=draw.integers(0, 64, length), learn=draw.random(length) < 0.7) for length in LENGTHS]


def logits(model: Llama, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["input_ids"], position_ids=batch["position_ids"])


def token_losses(model: Llama, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """[B, T]; 0 where the label is ignored."""
    return torch.nn.functional.cross_entropy(logits(model, batch).mT, batch["labels"], reduction="none")


def test_packed_rows_are_unpacked_rows_of_their_length_to_the_last_bit(model: Llama, examples: list[Example]) -> None:
    bins = first_fit_decreasing(LENGTHS, 32)
    packed = build_rows([[examples[i] for i in each] for each in bins], length=32)
    unpacked = build_rows([[examples[i]] for each in bins for i in each], length=32)
    assert len(packed["input_ids"]) == 2 and len(unpacked["input_ids"]) == len(LENGTHS)
    for values in (logits, token_losses):
        found, expected = (values(model, batch)[batch["segment_ids"] > 0] for batch in (packed, unpacked))
        assert torch.equal(found, expected)
        assert float(found.abs().max()) > 0.1


def test_logits_of_packed_rows_are_those_of_single_examples(model: Llama, examples: list[Example]) -> None:
    bins = first_fit_decreasing(LENGTHS, 32)
    packed = build_rows([[examples[i] for i in each] for each in bins], length=32)
    found = logits(model, packed)[packed["segment_ids"] > 0]
    single = [logits(model, build_rows([[examples[i]]], length=LENGTHS[i]))[0] for each in bins for i in each]
    assert len(bins) == 2
    torch.testing.assert_close(found, torch.cat(single), rtol=0, atol=TOL_FP64_SUM)


def test_no_example_sees_another_to_the_last_bit(model: Llama, examples: list[Example]) -> None:
    batch = build_rows([examples[:4]], length=32)
    expected = logits(model, batch)
    for segment in range(1, 5):
        inside = batch["segment_ids"] == segment
        poisoned = batch | {"input_ids": torch.where(inside, batch["input_ids"], (batch["input_ids"] + 1) % 64)}
        found = logits(model, poisoned)
        assert torch.equal(found[inside], expected[inside])
        assert not torch.equal(found[~inside], expected[~inside])
