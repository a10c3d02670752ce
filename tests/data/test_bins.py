"""Packed examples are the examples: same tokens, labels, positions and values, wherever they lie."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.data import Example, Pair, Unit, build_rows, check_vocabulary, first_fit_decreasing, fit
from meshkit.data.bins import value_names
from meshkit.data.examples import members, unit_length
from meshkit.errors import DataError

MARKS = ("input_ids", "labels", "position_ids")


def example(length: int, seed: int = 0, **changes: Any) -> Example:
    """Random ids, about half of them learnt, a reward per token and a margin."""
    draw = np.random.default_rng([length, seed])
    return Example(
        **{
            "ids": draw.integers(1, 1000, length),
            "learn": draw.random(length) < 0.5,
            "source": f"made:{seed}",
            "token_values": {"reward": draw.normal(size=length)},
            "scalars": {"margin": float(draw.normal())},
            **changes,
        }
    )


units = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=20).map(
    lambda lengths: [
        example(a, seed) if b == 0 else Pair(example(a, seed), example(b, seed + 100))
        for seed, (a, b) in enumerate(lengths)
    ]
)


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 30), max_size=60), extra=st.integers(0, 20))
def test_bins_hold_each_index_once_and_are_first_fit_decreasing(lengths: list[int], extra: int) -> None:
    capacity = max(lengths, default=1) + extra
    bins = first_fit_decreasing(lengths, capacity)
    assert sorted(index for each in bins for index in each) == list(range(len(lengths)))
    simple: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room = next((each for each in simple if sum(lengths[i] for i in each) + lengths[index] <= capacity), None)
        simple.append([index]) if room is None else room.append(index)
    assert bins == simple


@settings(deadline=None, max_examples=40)
@given(units=units, length=st.integers(24, 40))
def test_packed_equals_unpacked(units: list[Unit], length: int) -> None:
    bins = first_fit_decreasing([unit_length(unit) for unit in units], length)
    names = ("reward", "margin")
    packed = build_rows([[units[i] for i in each] for each in bins], length=length, names=names)
    order = [each for indices in bins for i in indices for each in members(units[i])]
    assert all(tensor.shape == (len(bins), length) for tensor in packed.values())
    assert packed["segment_ids"].max() == len(order)
    for segment, one in enumerate(order, start=1):
        alone = build_rows([[one]], length=len(one), names=names)
        rows, columns = (packed["segment_ids"] == segment).nonzero(as_tuple=True)
        assert len(set(rows.tolist())) == 1
        for name, tensor in alone.items():
            if name != "segment_ids":
                assert torch.equal(packed[name][rows, columns], tensor[0]), name
    padding = packed["segment_ids"] == 0
    assert (packed["labels"][padding] == -100).all()
    for name in ("input_ids", "ends", *names):
        assert (packed[name][padding] == 0).all()


@settings(deadline=None, max_examples=40)
@given(units=units)
def test_a_document_of_the_model_is_a_segment(units: list[Unit]) -> None:
    batch = build_rows([units], length=sum(map(unit_length, units)) + 3)
    starts = torch.nn.functional.pad(batch["position_ids"].diff(dim=1) != 1, (1, 0), value=True)
    documents = starts.cumsum(dim=1)
    segments = batch["segment_ids"].clone()
    segments[segments == 0] = segments.max() + 1  # the padding is the last document
    assert torch.equal(documents, segments)


@settings(deadline=None, max_examples=40)
@given(units=units)
def test_sums_over_segments_are_the_values_of_their_examples(units: list[Unit]) -> None:
    batch = build_rows([units], length=sum(map(unit_length, units)) + 1, names=("reward", "margin"))
    order = [each for unit in units for each in members(unit)]
    sums = torch.zeros(2, len(order) + 1, dtype=torch.float64)
    for row, name in enumerate(("reward", "margin")):
        sums[row].index_add_(0, batch["segment_ids"].flatten(), batch[name].flatten())
    assert sums[0, 1:].numpy() == pytest.approx([each.token_values["reward"][1:].sum() for each in order])
    assert sums[1, 1:].tolist() == [each.scalars["margin"] for each in order]
    learnt = batch["labels"] != -100
    assert learnt.sum() == sum(each.learn[1:].sum() for each in order)
    assert torch.equal(batch["labels"][:, :-1][learnt[:, :-1]], batch["input_ids"][:, 1:][learnt[:, :-1]])


def test_chosen_is_odd_and_rejected_the_next_over_the_whole_batch() -> None:
    pairs = [Pair(example(3, i), example(2, i)) for i in range(4)]
    batch = build_rows([pairs[:1], [], pairs[1:]], length=16)
    ids = batch["segment_ids"]
    assert ids[0].tolist() == [1] * 3 + [2] * 2 + [0] * 11
    assert ids[1].tolist() == [0] * 16
    assert ids[2].tolist() == [3] * 3 + [4] * 2 + [5] * 3 + [6] * 2 + [7] * 3 + [8] * 2 + [0]
    assert batch["ends"].sum() == 8
    assert build_rows([], length=5, names=("reward",))["reward"].shape == (0, 5)
    assert {name: build_rows([], length=5)[name].dtype for name in MARKS} == dict.fromkeys(MARKS, torch.int64)


@settings(deadline=None, max_examples=40)
@given(units=units, seq_len=st.integers(1, 24))
def test_truncation_keeps_what_it_says(units: list[Unit], seq_len: int) -> None:
    dropped = fit(units, seq_len=seq_len, truncate="drop")
    assert dropped == [unit for unit in units if unit_length(unit) <= seq_len]
    for unit in fit(units, seq_len=seq_len, truncate="left"):
        assert unit_length(unit) <= seq_len
        for part in members(unit):
            whole = next(
                each
                for other in units
                for each in members(other)
                if each.source == part.source
                and len(each) >= len(part)
                and np.array_equal(each.ids[len(each) - len(part) :], part.ids)
            )
            assert part.learn.sum() == whole.learn.sum()
            assert not part.truncated
    for unit in fit(units, seq_len=seq_len, truncate="right"):
        assert unit_length(unit) <= seq_len
        assert all(part.learn.any() or unit in units for part in members(unit))


def test_truncation_of_a_pair_by_hand() -> None:
    def part(prompt: int, answer: int) -> Example:
        length = prompt + answer
        return Example(
            ids=np.arange(length), learn=np.arange(length) >= prompt, token_values={"r": np.arange(length) * 0.1}
        )

    pair = Pair(part(4, 5), part(4, 2))
    (left,) = fit([pair], seq_len=10, truncate="left")
    assert isinstance(left, Pair)
    assert [each.ids.tolist() for each in left] == [[3, 4, 5, 6, 7, 8], [3, 4, 5]]  # 3 each: the prompt stays the same
    (right,) = fit([pair], seq_len=10, truncate="right")
    assert [each.ids.tolist() for each in members(right)] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert [each.truncated for each in members(right)] == [True, True]
    assert members(right)[0].token_values["r"].tolist() == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert fit([pair], seq_len=6, truncate="left") == []  # 5 each would cut into an answer
    assert fit([pair], seq_len=8, truncate="right") == []  # prompts alone
    with pytest.raises(
        DataError, match="an example: takes 15 tokens, but a row holds seq_len=10. Give a larger seq_len, or"
    ):
        fit([pair], seq_len=10, truncate="error")
    with pytest.raises(DataError, match="truncate='middle': no such way. Give error, drop, left or right"):
        fit([pair], seq_len=10, truncate="middle")  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match="example 1 takes 9 tokens, but a row holds 8"):
        first_fit_decreasing([3, 9], 8)
    with pytest.raises(DataError, match="made:0: does not fit into a row of 4 tokens"):
        build_rows([[example(5)]], length=4)
    with pytest.raises(
        DataError, match=r"made:1: has the values \['margin'\], but made:0 has \['reward', 'margin'\]\. Give"
    ):
        value_names([example(3), example(3, 1, token_values={})])
    with pytest.raises(DataError, match=r"values named \['labels'\]: a name of a batch"):
        value_names([example(3, scalars={"labels": 1.0})])
    with pytest.raises(DataError, match=r"x: its vectors have different lengths: \{'ids': 2, 'learn': 3\}"):
        Example(ids=np.zeros(2, dtype=np.int64), learn=np.zeros(3, dtype=bool), source="x")
    with pytest.raises(DataError, match="x: has no tokens"):
        Example(ids=np.zeros(0, dtype=np.int64), learn=np.zeros(0, dtype=bool), source="x")
    bad = example(3, ids=np.array([5, 1000, -1]))
    with pytest.raises(
        DataError, match="made:0: id 1000 at position 1 is outside the vocabulary of 1000. Encode it with"
    ):
        check_vocabulary([bad], 1000)


def test_rows_are_filled_within_the_bound_of_the_algorithm() -> None:
    lengths = np.random.default_rng(0).integers(1, 700, 3000).tolist()
    bins = first_fit_decreasing(lengths, 1024)
    assert len(bins) <= 11 / 9 * (sum(lengths) / 1024 + 1) + 1
    assert all(sum(lengths[i] for i in a) >= sum(lengths[i] for i in b) - 1024 for a, b in pairwise(bins))
