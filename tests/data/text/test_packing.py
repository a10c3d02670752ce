"""Packing against a walk over the documents, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.data import Tokens, pack_batch, pack_sample, sample_count
from meshkit.errors import DataError

DOCUMENTS = st.lists(st.lists(st.integers(1, 999), max_size=9), min_size=1, max_size=8).filter(
    lambda documents: sum(map(len, documents)) >= 2
)


def walked(documents: list[list[int]], index: int, seq_len: int, *, apart: bool) -> dict[str, list[int]]:
    """One sample by hand: None stands for the padding, a document of its own."""
    stream = [(number, token) for number, document in enumerate(documents) for token in document]
    sample: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
    previous, position = object(), 0
    for place in range(index * seq_len, (index + 1) * seq_len):
        here, token = stream[place] if place < len(stream) else (None, 0)
        after, label = stream[place + 1] if place + 1 < len(stream) else (None, -100)
        position = position + 1 if here == previous else 0
        previous = here
        sample["input_ids"].append(token)
        sample["labels"].append(label if here == after or not apart else -100)
        sample["position_ids"].append(position)
    if not apart:
        del sample["position_ids"]
    return sample


@settings(deadline=None)
@given(documents=DOCUMENTS, seq_len=st.integers(1, 12), apart=st.booleans())
def test_every_sample_equals_a_walk_over_the_documents(
    make_tokens: Callable[..., Tokens], documents: list[list[int]], seq_len: int, apart: bool
) -> None:
    tokens = make_tokens(documents)
    for index in range(sample_count(tokens, seq_len, last="pad") + 1):
        sample = pack_sample(tokens, index, seq_len=seq_len, documents=apart)
        assert {name: value.tolist() for name, value in sample.items()} == walked(
            documents, index, seq_len, apart=apart
        )


@settings(deadline=None)
@given(documents=DOCUMENTS, seq_len=st.integers(1, 12))
def test_every_token_but_the_first_of_each_document_is_a_label_once(
    make_tokens: Callable[..., Tokens], documents: list[list[int]], seq_len: int
) -> None:
    tokens = make_tokens(documents)
    count = sample_count(tokens, seq_len, last="pad")
    labels = pack_batch(tokens, list(range(count)), seq_len=seq_len)["labels"]
    assert Counter(labels[labels >= 0].tolist()) == Counter(t for document in documents for t in document[1:])


@settings(deadline=None)
@given(documents=DOCUMENTS, seq_len=st.integers(1, 12))
def test_dropping_the_last_window_leaves_only_full_ones(
    make_tokens: Callable[..., Tokens], documents: list[list[int]], seq_len: int
) -> None:
    tokens = make_tokens(documents)
    labels = sum(map(len, documents)) - 1
    padded = sample_count(tokens, seq_len, last="pad")
    assert (padded - 1) * seq_len < labels <= padded * seq_len
    if labels < seq_len:
        with pytest.raises(DataError, match=f"one sample of seq_len={seq_len} takes {seq_len + 1}"):
            sample_count(tokens, seq_len)
    else:
        assert sample_count(tokens, seq_len) * seq_len <= labels < (sample_count(tokens, seq_len) + 1) * seq_len


def test_no_rows_make_tensors_of_zero_rows(make_tokens: Callable[..., Tokens]) -> None:
    tokens = make_tokens([[1, 2, 3]])
    assert {n: tuple(v.shape) for n, v in pack_batch(tokens, [], seq_len=2).items()} == dict.fromkeys(
        ["input_ids", "labels", "position_ids"], (0, 2)
    )
    assert list(pack_batch(tokens, [], seq_len=2, documents=False)) == ["input_ids", "labels"]


def test_sizes_that_make_no_sample_are_refused(make_tokens: Callable[..., Tokens]) -> None:
    with pytest.raises(DataError, match="seq_len=0: a sample needs at least 1 token"):
        sample_count(make_tokens([[1, 2]]), 0)
    with pytest.raises(
        DataError, match=r"made.tokens: has 3 tokens, but one sample of seq_len=3 takes 4. Use more text"
    ):
        sample_count(make_tokens([[1], [2, 3]]), 3)
    with pytest.raises(DataError, match="has 1 tokens, but one sample of seq_len=3 takes 2"):
        sample_count(make_tokens([[1]]), 3, last="pad")


def test_id_outside_the_vocabulary_stops_the_sample_that_holds_it(make_tokens: Callable[..., Tokens]) -> None:
    tokens = make_tokens([[1, 2, 3, 9, 4]], vocab_size=9)
    pack_sample(tokens, 0, seq_len=2)
    with pytest.raises(DataError, match=r"made.tokens: id 9 at position 3 is outside the vocabulary of 9"):
        pack_sample(tokens, 1, seq_len=2)
