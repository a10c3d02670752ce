"""One sequence of samples, on any number of ranks, from any step again."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.data import Loader, Tokens, evaluation_batches
from meshkit.errors import DataError

SEQ_LEN = 3
SAMPLES = 7
MakeTokens = Callable[..., Tokens]


@pytest.fixture(scope="session")
def tokens(make_tokens: MakeTokens) -> Tokens:
    """7 samples of 3 tokens and a rest; sample i starts with id 3 * i, so that its rows say which it is."""
    return make_tokens([list(range(10)), list(range(10, SAMPLES * SEQ_LEN + 2))], vocab_size=100)


def loader(tokens: Tokens, **changes: Any) -> Loader:
    return Loader(tokens, **{"seq_len": SEQ_LEN, "global_batch": 4, "seed": 0, **changes})


def samples_of(batch: dict[str, torch.Tensor]) -> list[int]:
    return [int(row[0]) // SEQ_LEN for row in batch["input_ids"]]


@settings(deadline=None)
@given(global_batch=st.integers(1, 10), ranks=st.integers(1, 12), seed=st.integers(0, 99))
def test_ranks_together_hold_the_global_batch_of_one_rank(
    tokens: Tokens, global_batch: int, ranks: int, seed: int
) -> None:
    whole = loader(tokens, global_batch=global_batch, seed=seed)
    parts = [loader(tokens, global_batch=global_batch, seed=seed, rank=r, ranks=ranks) for r in range(ranks)]
    for expected, *batches in islice(zip(whole, *parts, strict=True), 5):
        for name, rows in expected.items():
            assert rows.shape == (global_batch, SEQ_LEN)
            assert torch.equal(torch.cat([batch[name] for batch in batches]), rows)
        counts = [len(batch["labels"]) for batch in batches]
        assert max(counts) - min(counts) <= 1


@settings(deadline=None)
@given(global_batch=st.integers(1, 20), seed=st.integers(0, 99))
def test_each_epoch_holds_each_sample_once_and_batches_run_across(tokens: Tokens, global_batch: int, seed: int) -> None:
    data = loader(tokens, global_batch=global_batch, seed=seed)
    stream = [sample for batch in islice(data, 3 * SAMPLES) for sample in samples_of(batch)]
    epochs = [stream[start : start + SAMPLES] for start in range(0, 3 * SAMPLES, SAMPLES)]
    assert global_batch < 3 or all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)
    assert data.epoch == 3 * global_batch
    assert data.samples_per_epoch == SAMPLES


def test_order_changes_with_the_epoch_and_the_seed_only(tokens: Tokens) -> None:
    def order(**changes: Any) -> list[int]:
        return [
            sample for batch in islice(loader(tokens, global_batch=1, **changes), 21) for sample in samples_of(batch)
        ]

    first = order()
    assert first == order()
    assert first == order(documents=False)
    assert first != order(seed=1)
    assert len({tuple(first[start : start + SAMPLES]) for start in (0, 7, 14)}) == 3


@settings(deadline=None)
@given(before=st.integers(0, 6), batches=st.tuples(st.integers(1, 9), st.integers(1, 9)), ranks=st.integers(1, 4))
def test_resume_goes_on_with_the_same_samples_on_other_ranks_and_batches(
    tokens: Tokens, before: int, batches: tuple[int, int], ranks: int
) -> None:
    whole = loader(tokens, global_batch=1)
    stopped = loader(tokens, global_batch=batches[0], rank=0, ranks=2)
    list(islice(stopped, before))
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = [loader(tokens, global_batch=batches[1], rank=r, ranks=ranks) for r in range(ranks)]
    for part in resumed:
        part.load_state_dict(state)
    got = [s for steps in islice(zip(*resumed, strict=True), 3) for batch in steps for s in samples_of(batch)]
    start = before * batches[0]
    expected = [s for batch in islice(whole, start, start + 3 * batches[1]) for s in samples_of(batch)]
    assert got == expected


def test_max_steps_counts_across_a_resume(tokens: Tokens) -> None:
    straight = [samples_of(batch) for batch in loader(tokens, max_steps=5)]
    first, second = loader(tokens, max_steps=2), loader(tokens, max_steps=5)
    head = [samples_of(batch) for batch in first]
    second.load_state_dict(first.state_dict())
    assert head + [samples_of(batch) for batch in second] == straight
    assert len(straight) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"seed": 1},
            "has seed=0, but this run has seed=1, .* Give the seed of the saved run",
        ),
        ({"seq_len": 2}, "has seq_len=3, but this run has seq_len=2"),
        ({"documents": False}, "has documents=True, but this run has documents=False"),
    ],
)
def test_data_position_of_another_run_is_refused(tokens: Tokens, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        loader(tokens, **changes).load_state_dict(loader(tokens).state_dict())


def test_data_position_of_other_data_or_of_something_else_is_refused(tokens: Tokens, make_tokens: MakeTokens) -> None:
    other = make_tokens([list(range(30))], fingerprint="other")
    with pytest.raises(DataError, match="has data='other', but this run has data='made', which is another sequence"):
        loader(tokens).load_state_dict(loader(other).state_dict())
    state = loader(tokens).state_dict()
    del state["samples"], state["seed"]
    with pytest.raises(DataError, match=r"the saved data position lacks \['samples', 'seed'\]"):
        loader(tokens).load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": 0}, "global_batch=0: a step needs at least 1 sample"),
        ({"seq_len": 0}, "seq_len=0: a sample needs at least 1 token"),
        ({"seq_len": 23}, "made.tokens: has 23 tokens, but one sample of seq_len=23 takes 24"),
        ({"rank": 2, "ranks": 2}, "rank=2 of ranks=2: there is no such data rank"),
        (
            {"vocab_size": 99},
            "made.tokens: holds ids up to 99, but the model has vocab_size=99. Give the model at least",
        ),
    ],
)
def test_sizes_that_make_no_batch_are_refused(tokens: Tokens, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        loader(tokens, **changes)


@settings(deadline=None)
@given(batch=st.integers(1, 5), ranks=st.integers(1, 5), seq_len=st.integers(1, 30))
def test_evaluation_sees_every_label_once_in_equal_batches_on_every_rank(
    tokens: Tokens, batch: int, ranks: int, seq_len: int
) -> None:
    parts = [list(evaluation_batches(tokens, seq_len=seq_len, batch=batch, rank=r, ranks=ranks)) for r in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    assert all(rows.shape == (batch, seq_len) for part in parts for step in part for rows in step.values())
    rows = [row for steps in zip(*parts, strict=True) for step in steps for row in step["labels"]]
    labels = torch.cat(rows)
    assert labels[labels >= 0].tolist() == [*range(1, 10), *range(11, SAMPLES * SEQ_LEN + 2)]
    assert len(parts[0]) == -(-(len(tokens.ids) - 1) // (seq_len * batch * ranks))


def test_evaluation_sizes_that_make_no_batch_are_refused_at_once(tokens: Tokens) -> None:
    with pytest.raises(DataError, match="batch=0: an evaluation batch needs at least 1 row"):
        evaluation_batches(tokens, seq_len=SEQ_LEN, batch=0)
    with pytest.raises(DataError, match="rank=-1 of ranks=1"):
        evaluation_batches(tokens, seq_len=SEQ_LEN, batch=1, rank=-1)
