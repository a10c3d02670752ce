"""A batch that grows with the tokens or with the measured noise: the same samples in the same order, also after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from meshkit.data import BatchRamp, Example, ExampleLoader, Loader, MeasuredBatch, Tokens
from meshkit.errors import DataError
from meshkit.metrics import GradientNoise

SEQ_LEN = 3
MakeTokens = Callable[..., Tokens]


@pytest.fixture(scope="session")
def tokens(make_tokens: MakeTokens) -> Tokens:
    """40 samples of 3 tokens; sample i starts with id 3 * i."""
    return make_tokens([list(range(40 * SEQ_LEN + 1))], vocab_size=200)


def test_a_ramp_is_linear_in_whole_multiples_of_the_first() -> None:
    ramp = BatchRamp(first=4, last=18, tokens=100)
    assert [ramp(seen) for seen in (0, 28, 29, 57, 58, 86, 99, 100, 10**9)] == [4, 4, 8, 8, 12, 16, 16, 16, 16]
    assert BatchRamp(first=5, last=5, tokens=1)(10**6) == 5


def grown(tokens: Tokens, batch: Any, **changes: Any) -> Loader:
    return Loader(tokens, seq_len=SEQ_LEN, global_batch=batch, seed=0, **changes)


def test_every_number_of_ranks_has_the_same_steps(tokens: Tokens) -> None:
    ramp = BatchRamp(first=3, last=12, tokens=90)
    whole = [batch["input_ids"] for batch in islice(grown(tokens, ramp), 8)]
    assert [len(each) for each in whole] == [3, 3, 3, 3, 6, 6, 9, 12]  # after 0, 9, 18, 27, 36, 54, 72, 99 tokens
    plain = grown(tokens, 1)
    stream = torch.cat([next(plain)["input_ids"] for _ in range(45)])
    assert torch.equal(torch.cat(whole), stream)
    for ranks in (2, 5, 16):
        parts = [grown(tokens, ramp, rank=rank, ranks=ranks) for rank in range(ranks)]
        for expected in whole:
            assert torch.equal(torch.cat([next(part)["input_ids"] for part in parts]), expected)


@pytest.mark.parametrize("after", [0, 3, 5])
def test_a_resumed_run_goes_on_with_the_batch_that_it_had(tokens: Tokens, after: int) -> None:
    ramp = BatchRamp(first=3, last=12, tokens=90)
    straight = grown(tokens, ramp)
    for _ in islice(straight, after):
        pass
    resumed = grown(tokens, ramp, rank=1, ranks=3)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.global_batch == straight.global_batch
    size = straight.global_batch
    assert torch.equal(next(resumed)["labels"], next(straight)["labels"][size // 3 : 2 * size // 3])


def test_a_measured_batch_follows_the_noise_and_is_part_of_the_state(tokens: Tokens) -> None:
    batch = MeasuredBatch(first=4, last=18)
    data = grown(tokens, batch)
    assert len(next(data)["labels"]) == 4
    assert batch.measured(float("inf"), seq_len=SEQ_LEN) == 4  # hidden in its noise: nothing follows
    assert batch.measured(11 * SEQ_LEN, seq_len=SEQ_LEN) == 8
    assert len(next(data)["labels"]) == 8
    assert batch.measured(SEQ_LEN, seq_len=SEQ_LEN) == 8  # never fewer again
    state = json.loads(json.dumps(data.state_dict()))
    assert batch.measured(1e9, seq_len=SEQ_LEN) == 16
    resumed = grown(tokens, MeasuredBatch(first=4, last=18))
    resumed.load_state_dict(state)
    assert resumed.global_batch == 8
    with pytest.raises(DataError, match="multiples of 3 up to 9"):
        grown(tokens, MeasuredBatch(first=3, last=9)).load_state_dict(state)
    assert len(next(data)["labels"]) == 16
    grown(tokens, 5).load_state_dict(state)  # of a run whose batch is fixed, the sequence goes on


def test_the_meter_says_what_the_batch_is_told() -> None:
    noise = GradientNoise()
    noise.add([3.0**0.5], [16], 2.0**0.5, 32)  # |G|² = 1 and S = 32: of 16 tokens 1 + 2, of 32 1 + 1
    batch = MeasuredBatch(first=2, last=64)
    assert batch.measured(noise.scale().tokens * 1.0001, seq_len=4) == 8


def test_examples_grow_by_rows() -> None:
    units = [Example(ids=np.array([i, i]), learn=np.array([False, True])) for i in range(20)]
    data = ExampleLoader(units, seq_len=2, global_batch=BatchRamp(first=2, last=6, tokens=12), seed=0, packing="none")
    assert [len(next(data)["labels"]) for _ in range(4)] == [2, 2, 4, 6]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BatchRamp(first=4, last=3, tokens=1), "from 4 to 3"),
        (lambda: BatchRamp(first=0, last=3, tokens=1), "from 0 to 3"),
        (lambda: BatchRamp(first=1, last=3, tokens=0), "tokens=0"),
        (lambda: MeasuredBatch(first=2, last=1), "from 2 to 1"),
        (lambda: MeasuredBatch(first=1, last=1).measured(float("nan"), seq_len=1), "nan"),
        (lambda: MeasuredBatch(first=1, last=1).measured(-1.0, seq_len=1), "-1.0"),
    ],
)
def test_sizes_that_do_not_grow_are_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        make()


@pytest.mark.parametrize("size", [0, -1, 2.0, None, True])
def test_what_says_no_number_is_refused(tokens: Tokens, size: Any) -> None:
    with pytest.raises(DataError, match="must say a whole number"):
        next(grown(tokens, lambda seen: size))
