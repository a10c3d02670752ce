"""The microbatches that an estimate runs have the peak of all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import meshkit as mk
from meshkit.models import LLAMA_PLAN, Llama, meta_parameters
from meshkit.preflight.estimate._microbatches import rows_of
from tests.tiny import tiny_config

TOL = 0.004  # token ids and positions of the rows that are not run, 2 x 8 B a token
CONFIG = tiny_config(vocab_size=512, hidden_size=64, intermediate_size=224, num_hidden_layers=4)
PP = mk.strategy.PipelinePolicy


@pytest.mark.parametrize(
    ("mesh", "microbatches", "choices"),
    [
        ("dp_shard=4", 6, {"zero": 1}),
        ("dp_replicate=2 dp_shard=2", 6, {"zero": 3}),
        ("pp=2", 9, {}),
        ("pp=4", 9, {}),
        ("pp=2 dp_shard=2", 8, {"pipeline": PP(schedule="interleaved")}),
        ("pp=2", 9, {"pipeline": PP(schedule="zb-h1")}),
        ("pp=2", 9, {"pipeline": PP(schedule="zbv")}),
        ("pp=2", 9, {"pipeline": PP(schedule="v-half")}),
        ("pp=4", 16, {"pipeline": PP(schedule="zbv")}),
        ("pp=4", 16, {"pipeline": PP(schedule="v-half")}),
    ],
    ids=str,
)
def test_fewer_microbatches_have_the_peak_of_all(mesh: str, microbatches: int, choices: dict[str, Any]) -> None:
    with meta_parameters():
        model = Llama(replace(CONFIG, vocab_size=32, num_hidden_layers=8))  # fullest in its blocks, not in the loss
    step: dict[str, Any] = {"plan": LLAMA_PLAN, "rows": 2 * microbatches + 1, "seq_len": 64, **choices}
    fewer, every = (
        mk.estimate(model, mesh, microbatches=microbatches, every_microbatch=each, **step) for each in (False, True)
    )
    assert fewer.traced < microbatches == every.traced
    assert fewer.peak_bytes == pytest.approx(every.peak_bytes, rel=TOL)
    assert f"microbatches: {fewer.traced} of {microbatches} were run" in str(fewer)
    assert "were run" not in str(every)


def test_two_microbatches_do_not_stand_for_a_pipeline() -> None:
    """What the law is for: the first stage of four holds four microbatches, and two say less."""
    with meta_parameters():
        model = Llama(CONFIG)
    two, all_ = (
        mk.estimate(model, "pp=4", plan=LLAMA_PLAN, rows=count, seq_len=64, microbatches=count) for count in (2, 16)
    )
    assert all_.peak_bytes > 1.2 * two.peak_bytes
    assert all_.traced == 5


@pytest.mark.parametrize(
    ("rows", "microbatches", "count", "expected"),
    [(64, 64, 3, 3), (7, 3, 3, 7), (9, 4, 3, 7), (11, 4, 3, 8), (2, 8, 3, 2)],
)
def test_the_first_and_the_last_of_fewer_are_as_large(rows: int, microbatches: int, count: int, expected: int) -> None:
    assert rows_of(rows, microbatches, count) == expected
