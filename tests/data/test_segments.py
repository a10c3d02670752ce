"""What is taken out of a batch is what a batch of it alone would be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshkit as mk
from meshkit.data import build_rows, split_mismatches, take_segments, with_mismatches
from meshkit.data.examples import Example

VALUES = ("reward", "desirable")


def example(number: int, length: int) -> Example:
    ids = np.arange(length) + 100 * number
    values = {"reward": ids / 7}
    return Example(ids=ids, learn=ids % 3 > 0, token_values=values, scalars={"desirable": float(number)})


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), max_size=9), chosen=st.sets(st.integers(1, 9)))
def test_segments_taken_are_the_batch_of_their_examples(lengths: list[int], chosen: set[int]) -> None:
    examples = [example(number, length) for number, length in enumerate(lengths, start=1)]
    batch = build_rows([[one] for one in examples], length=12, names=VALUES)
    numbers = sorted(number for number in chosen if number <= len(examples))
    taken = take_segments(batch, numbers)
    rows = [
        [examples[int(taken["input_ids"][row, start]) // 100 - 1] for start in _starts(taken, row)]
        for row in range(len(taken["input_ids"]))
    ]
    assert sorted(int(one.ids[0]) // 100 for row in rows for one in row) == numbers
    expected = build_rows(rows, length=12, names=VALUES)
    assert taken.keys() == expected.keys()
    for name, tensor in expected.items():
        assert taken[name].dtype == tensor.dtype and torch.equal(taken[name], tensor), name


def _starts(batch: dict[str, torch.Tensor], row: int) -> list[int]:
    segments = batch["segment_ids"][row]
    return [int((segments == number).nonzero()[0]) for number in segments.unique() if number > 0]


def test_answers_and_their_mismatches_come_apart() -> None:
    units = with_mismatches([replace(example(number, 4), learn=np.arange(4) > 1) for number in (1, 2, 3)])
    batch = build_rows([list(units[:2]), list(units[2:])], length=16, names=VALUES)
    answers, mismatched = split_mismatches(batch)
    heads, tails = {100, 200, 300}, {102, 202, 302}
    for part, others in ((answers, False), (mismatched, True)):
        first = part["input_ids"][part["position_ids"] == 0]
        assert heads <= set(first.tolist()) and part["segment_ids"].max() == 3
        for number in (1, 2, 3):
            prompt, _, answer, _ = part["input_ids"][part["segment_ids"] == number].tolist()
            assert answer in tails and (answer != prompt + 2) is others


def test_an_answer_without_a_mismatch_is_refused() -> None:
    batch = build_rows([[example(1, 3)]], length=4, names=VALUES)
    with pytest.raises(mk.errors.DataError, match="segment_ids go up to 1, an odd number"):
        split_mismatches(batch)
