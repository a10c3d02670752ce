"""Mixtures: shares by weights to within one sample, on any number of ranks, from any step again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.data import BatchRamp, Loader, Mixture, Tokens
from meshkit.errors import DataError

SEQ_LEN = 3
SAMPLES = {"web": 11, "code": 4, "maths": 7}
FIRST = {"web": 0, "code": 100, "maths": 200}  # ids of each source begin there: rows say where they are from


@pytest.fixture(scope="session")
def sources(make_tokens: Callable[..., Tokens]) -> dict[str, Tokens]:
    """Sample i of a source begins with its first id + 3 i."""
    return {
        name: make_tokens(
            [list(range(FIRST[name], FIRST[name] + count * SEQ_LEN + 1))], vocab_size=300, fingerprint=name
        )
        for name, count in SAMPLES.items()
    }


def loader(mixture: Mixture, **changes: Any) -> Loader:
    return Loader(mixture, **{"seq_len": SEQ_LEN, "global_batch": 5, "seed": 0, **changes})


def picked(batch: dict[str, torch.Tensor]) -> list[tuple[str, int]]:
    """(source, sample) of each row; labels and positions are of the same sample."""
    found = []
    for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        first = int(ids[0])
        name = next(name for name in ("maths", "code", "web") if first >= FIRST[name])
        assert ids.tolist() == [first, first + 1, first + 2]
        assert labels.tolist() == [first + 1, first + 2, first + 3]
        assert positions.tolist() == [0, 1, 2]
        found.append((name, (first - FIRST[name]) // SEQ_LEN))
    return found


WEIGHTS = st.tuples(*[st.integers(0, 9)] * 3).filter(any)


@settings(deadline=None, max_examples=40)
@given(
    weights=WEIGHTS, batch=st.integers(1, 9), ranks=st.integers(1, 6), seed=st.integers(0, 9), stop=st.integers(0, 5)
)
def test_any_ranks_take_one_sequence_from_any_step(sources, weights, batch, ranks, seed, stop) -> None:
    mixture = Mixture(sources, dict(zip(SAMPLES, weights, strict=True)))
    whole = list(islice(loader(mixture, global_batch=batch, seed=seed), 8))
    parts = [loader(mixture, global_batch=batch, seed=seed, rank=rank, ranks=ranks) for rank in range(ranks)]
    for step in range(stop):
        of_ranks = [next(part) for part in parts]
        for name, rows in whole[step].items():
            assert torch.equal(torch.cat([each[name] for each in of_ranks]), rows)
    assert len({json.dumps(part.state_dict()) for part in parts}) == 1
    state = json.loads(json.dumps(parts[0].state_dict()))
    again = loader(mixture, global_batch=batch, seed=seed)
    again.load_state_dict(state)
    for expected in whole[stop:]:
        found = next(again)
        assert all(torch.equal(found[name], rows) for name, rows in expected.items())


@settings(deadline=None, max_examples=40)
@given(weights=WEIGHTS, batch=st.integers(1, 9))
def test_each_source_gives_its_share_and_each_sample_once_an_epoch(sources, weights, batch) -> None:
    data = loader(Mixture(sources, dict(zip(SAMPLES, weights, strict=True))), global_batch=batch)
    stream: list[tuple[str, int]] = []
    for step in range(1, 40):
        stream += picked(next(data))
        taken = Counter(name for name, _ in stream)
        for name, weight in zip(SAMPLES, weights, strict=True):
            assert abs(taken[name] - step * batch * weight / sum(weights)) <= 1 + 1e-9
            assert weight or not taken[name]
    for name, count in SAMPLES.items():
        mine = [index for source, index in stream if source == name]
        assert data.epochs[name] == len(mine) / count
    assert data.epoch == len(stream) / sum(SAMPLES.values())
    # Of a step's rows the order is not the epoch's: within it each is there as often as another, give or take a step.
    for name, count in SAMPLES.items():
        seen = Counter(index for source, index in stream if source == name)
        whole = sum(seen.values()) // count
        assert all(whole - batch <= times <= whole + batch for times in seen.values())


def test_an_epoch_of_a_source_holds_each_of_its_samples_once(sources) -> None:
    data = loader(Mixture(sources, {"web": 1, "code": 1, "maths": 0}), global_batch=2)
    code = [index for batch in islice(data, 12) for name, index in picked(batch) if name == "code"]
    assert [sorted(code[at : at + 4]) for at in (0, 4, 8)] == [[0, 1, 2, 3]] * 3
    assert len({tuple(code[at : at + 4]) for at in (0, 4, 8)}) > 1


def test_weights_may_follow_the_step_and_be_others_after_a_resume(sources) -> None:
    def later(step: int) -> dict[str, float]:
        return {"web": 1.0, "code": 0.0, "maths": 0.0} if step < 4 else {"web": 0.0, "code": 0.5, "maths": 1.5}

    data = loader(Mixture(sources, later), global_batch=8)
    steps = [Counter(name for name, _ in picked(next(data))) for _ in range(6)]
    assert steps == [{"web": 8}] * 4 + [{"code": 2, "maths": 6}] * 2
    other = loader(Mixture(sources, {"web": 0, "code": 1, "maths": 0}), global_batch=3)
    other.load_state_dict(data.state_dict())
    assert Counter(name for name, _ in picked(next(other))) == {"code": 3}
    assert other.epochs["code"] == 7 / SAMPLES["code"]


def test_a_batch_that_grows_and_rows_for_fewer_than_all_ranks(sources) -> None:
    mixture = Mixture(sources, {"web": 2, "code": 1, "maths": 1})
    sizes = BatchRamp(first=2, last=6, tokens=40)
    whole = loader(mixture, global_batch=sizes)
    parts = [loader(mixture, global_batch=sizes, rank=rank, ranks=4) for rank in range(4)]
    for batch in islice(whole, 6):
        of_ranks = [next(part) for part in parts]
        assert all(each["input_ids"].shape[1:] == (SEQ_LEN,) for each in of_ranks)
        assert torch.equal(torch.cat([each["input_ids"] for each in of_ranks]), batch["input_ids"])


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"web": 1}, r"\['web'\] at step 0. Give a number for each of \['code', 'maths', 'web'\]"),
        ({"web": -1, "code": 2, "maths": 1}, "Give numbers of at least 0, one of them more"),
        ({"web": 0, "code": 0, "maths": 0}, "Give numbers of at least 0, one of them more"),
        ({"web": float("nan"), "code": 1, "maths": 1}, "Give numbers of at least 0"),
        ({"web": "1", "code": 1, "maths": 1}, "Give numbers of at least 0"),
        (lambda step: [1, 2, 3], "list at step 0"),
    ],
)
def test_weights_that_are_none_are_refused(sources, weights, words) -> None:
    with pytest.raises(DataError, match=words):
        Mixture(sources, weights)


def test_what_cannot_be_mixed_is_refused(sources, make_tokens) -> None:
    with pytest.raises(DataError, match="nothing to mix"):
        Mixture({}, {})
    other = make_tokens([list(range(20))], vocab_size=77)
    with pytest.raises(DataError, match="'web' has 300, 'other' has 77. Encode all sources by one tokenizer"):
        Mixture({"web": sources["web"], "other": other}, {"web": 1, "other": 1})
    mixture = Mixture({"web": sources["web"]}, {"web": 1})
    with pytest.raises(DataError, match="another sequence of samples"):
        loader(mixture).load_state_dict(loader(Mixture({"web": sources["code"]}, {"web": 1})).state_dict())
    with pytest.raises(DataError, match="lacks|another sequence"):
        loader(mixture).load_state_dict(Loader(sources["web"], seq_len=SEQ_LEN, global_batch=5, seed=0).state_dict())
