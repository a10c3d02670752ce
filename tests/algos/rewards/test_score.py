"""A reward scores what it can, says of the rest why not, and never ends or stalls the run."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch

import meshkit as mk
from meshkit.algos.rewards import (
    RewardPool,
    Scores,
    Unscored,
    arithmetic,
    countdown,
    exact_match,
    model_scores,
    score,
    score_on_mesh,
    weighted_sum,
)
from meshkit.algos.rollout import Rollout
from meshkit.errors import DataError, RewardError
from meshkit.models.reward import REWARD_PLAN, RewardModel
from tests.tiny import tiny_config
from tests.world import RankError, pool

TOL_FP64_SUM = 1e-10  # only summation order differs


def answer(text: str, *, truncated: bool = False, **fields: object) -> Rollout:
    return Rollout(text=text, ids=np.arange(len(text) + 1), fields=fields, truncated=truncated)


def of_text(given: Rollout) -> float | np.ndarray | None:
    """A reward that does what the text says."""
    match given.text:
        case "raise":
            raise ValueError("no such thing")
        case "exit":
            raise SystemExit(3)
        case "loop":
            while True:
                pass
        case "swallow":
            while True:
                with contextlib.suppress(Exception):
                    time.sleep(10)
        case "nan":
            return math.nan
        case "none":
            return None
        case "vector":
            return np.arange(len(given.ids)) / 2
        case "short":
            return np.zeros(1)
        case "word":
            return "good"  # type: ignore[return-value]
        case "die":
            os._exit(7)
    return float(given.text)


@pytest.mark.parametrize(
    ("verifier", "text", "fields", "value"),
    [
        (exact_match, " 46 ", {"completion": "46"}, 1),
        (exact_match, "046", {"completion": "46"}, 0),
        (arithmetic, "12 + 34 is 46.", {"completion": "46"}, 1),
        (arithmetic, "so 1,046.50", {"completion": "#### 1046.5"}, 1),
        (arithmetic, "it is -46", {"completion": "46"}, 0),
        (arithmetic, "46 or 47", {"completion": "46"}, 0),
        (arithmetic, "forty", {"completion": "46"}, 0),
        (countdown, "3*7+5", {"numbers": [3, 7, 5], "target": 26}, 1),
        (countdown, "5 + (7 * 3) = 26", {"numbers": [3, 7, 5], "target": 26}, 1),
        (countdown, "7*5", {"numbers": [3, 7, 5], "target": 35}, 1),  # not all are needed
        (countdown, "7/3*3", {"numbers": [3, 7, 3], "target": 7}, 1),  # exact, not in floats
        (countdown, "7+7", {"numbers": [3, 7, 5], "target": 14}, 0),  # one of them twice
        (countdown, "3*7+6", {"numbers": [3, 7, 5], "target": 27}, 0),  # one that is not there
        (countdown, "26", {"numbers": [3, 7, 5], "target": 26}, 0),
        (countdown, "3**7", {"numbers": [3, 7], "target": 2187}, 0),
        (countdown, "3/(7-7)", {"numbers": [3, 7, 7], "target": 0}, 0),
        (countdown, "-3+7", {"numbers": [3, 7], "target": 4}, 0),
        (countdown, "__import__('os').getpid()", {"numbers": [3], "target": 3}, 0),
        (countdown, "(" * 5000, {"numbers": [3], "target": 3}, 0),
        (countdown, "", {"numbers": [3], "target": 3}, 0),
        (countdown, "37", {"numbers": [3, 7], "target": 37}, 0),
        (countdown, "True+3", {"numbers": [1, 3], "target": 4}, 0),
    ],
)
def test_verifiers(verifier, text: str, fields: dict, value: float) -> None:
    assert verifier(answer(text, **fields)) == value
    assert verifier(answer(text, truncated=True, **fields)) == 0


def test_what_cannot_be_scored_is_left_out_counted_and_explained() -> None:
    answers = [answer(text) for text in ("1", "raise", "nan", "none", "vector", "short", "word", "exit", "-2")]
    scores = score(answers, of_text)
    np.testing.assert_array_equal(scores.totals, [1, *[math.nan] * 3, 10.5, *[math.nan] * 3, -2])
    assert scores.unscored == {"raised": 4, "not finite": 1, "no score": 1}
    assert scores.first_unscored == "raised: of_text: ValueError: no such thing"
    assert "shape (1,) for an answer of 6 tokens" in scores.values[5].text
    assert "'good', which is neither a number nor a vector" in scores.values[6].text
    by_token = scores.per_token(answers)
    assert [len(rewards) for rewards in by_token] == [len(each.ids) for each in answers]
    np.testing.assert_array_equal(by_token[0], [0, 1])
    np.testing.assert_array_equal(by_token[4], np.arange(7) / 2)
    assert math.isnan(by_token[1][-1]) and not by_token[1][:-1].any()
    (unreadable,) = score([answer("46", completion="none")], arithmetic).values
    assert "the completion 'none' has no number" in unreadable.text  # the row is at fault: not a wrong answer


def test_time_is_limited_for_each_answer_in_this_process() -> None:
    began = time.monotonic()
    scores = score([answer(text) for text in ("loop", "1", "swallow", "2")], of_text, timeout_s=0.3)
    assert time.monotonic() - began < 10
    assert scores.unscored == {"timed out": 2}
    np.testing.assert_array_equal(scores.totals, [math.nan, 1, math.nan, 2])


def test_a_timer_that_rings_while_it_is_stopped_does_not_ring_again(monkeypatch: pytest.MonkeyPatch) -> None:
    set_timer, rings, before = signal.setitimer, [signal.SIGALRM], signal.getsignal(signal.SIGALRM)
    left_s, interval_s = signal.getitimer(signal.ITIMER_REAL)  # pytest's

    def ring_first(timer: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        if seconds == 0 and rings:
            signal.raise_signal(rings.pop())
        return set_timer(timer, seconds, interval)

    monkeypatch.setattr(signal, "setitimer", ring_first)
    assert score([answer("1")], of_text, timeout_s=60.0).unscored == {"timed out": 1}
    after_s, after_interval_s = signal.getitimer(signal.ITIMER_REAL)
    assert after_s <= left_s and after_interval_s == interval_s
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_timer_of_the_callers_own_goes_on() -> None:
    rings: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rings.append(number))
    try:
        pytests = signal.setitimer(signal.ITIMER_REAL, 50.0, 7.0)
        score([answer("1")], of_text, timeout_s=60.0)
        left_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left_s <= 50.0 and interval_s == 7.0 and not rings
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        assert score([answer("loop")], of_text, timeout_s=0.3).unscored == {"timed out": 1}
        time.sleep(0.1)
        assert rings  # late, since it was due within the score
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *pytests)


def test_a_pool_kills_what_does_not_come_back_and_goes_on() -> None:
    with RewardPool(of_text, workers=2, timeout_s=1.0) as rewards:
        scores = rewards.score([answer(text) for text in ("1", "loop", "die", "raise", "nan", "3")])
        assert scores.unscored == {"timed out": 1, "raised": 2, "not finite": 1}
        assert "died with exit code 7" in scores.values[2].text
        np.testing.assert_array_equal(scores.totals[[0, 5]], [1, 3])
        assert rewards.score([]).values == ()


def test_sums_are_of_weighted_parts_and_lack_what_a_part_lacks() -> None:
    answers = [answer(text) for text in ("1", "vector", "1", "vector")]
    first = score(answers, of_text)
    bad = Unscored(kind="raised", text="no")
    total = weighted_sum({"task": (first, 2.0), "length": (Scores(values=(0.5, 4.0, bad, np.ones(7))), -1.0)})
    np.testing.assert_allclose(total.totals, [1.5, 17, math.nan, 14])
    np.testing.assert_allclose(total.values[1], [0, 1, 2, 3, 4, 5, 2])
    assert total.first_unscored == "raised: length: no"
    with pytest.raises(DataError, match="weighted_sum of parts with {'a': 4, 'b': 0} answers"):
        weighted_sum({"a": (first, 1.0), "b": (Scores(values=()), 1.0)})


def only_first_data_rank(answers: list[Rollout], *, mesh: mk.Mesh) -> Scores:
    assert mesh["tp"].get_local_rank() == 0, "each answer is scored once"
    if answers and answers[0].text == "broken":
        raise KeyError("scorer")
    return score(answers, of_text)


def scores_of_ranks(spec: str, texts: list[list[str]], fail_fast: bool) -> object:
    mesh = mk.init_mesh(spec)
    answers = [answer(text) for text in texts[mesh.data_rank]]
    try:
        found = score_on_mesh(mesh, answers, partial(only_first_data_rank, mesh=mesh), fail_fast=fail_fast)
    except RewardError as error:
        return str(error)
    return found.local.totals.tolist(), found.answers, found.unscored, found.first_unscored


def test_ranks_agree_on_scores_and_on_failures() -> None:
    """A rank without answers, one whose reward raises, and ranks of tp that would score again."""
    first, second = pool(2).run(scores_of_ranks, "dp_shard=2", [[], ["1", "raise"]], False)
    reason = "data rank 1, raised: of_text: ValueError: no such thing"
    assert first == ([], 2, {"raised": 1}, reason)
    assert second == (pytest.approx([1, math.nan], nan_ok=True), 2, {"raised": 1}, reason)
    first, second = pool(2).run(scores_of_ranks, "tp=2", [["1", "2"]], False)
    assert first == second == ([1, 2], 2, {}, None)


@pytest.mark.parametrize(
    ("texts", "match"),
    [
        ([["1"], ["2", "nan"]], "1 of 3 answers have no score; the first: data rank 1, not finite"),
        ([["1"], ["broken"]], "scoring failed on rank 1: KeyError: 'scorer'"),
    ],
)
def test_a_failure_that_ends_the_step_ends_it_on_every_rank(texts: list[list[str]], match: str) -> None:
    first, second = pool(2).run(scores_of_ranks, "dp_shard=2", texts, True)
    assert first == second
    assert match in first


def scores_by_model(spec: str, lengths: list[list[int]]) -> list[float]:
    torch.set_default_dtype(torch.float64)
    try:
        mesh = mk.init_mesh(spec)
        with torch.device("meta"):
            model = RewardModel(tiny_config())
        run = mk.parallelize(model, mesh, plan=REWARD_PLAN)
        mk.init_weights(run.model, seed=0)
        draws = [np.random.default_rng(length) for length in lengths[mesh.data_rank]]
        sequences = [draw.integers(0, 32, length) for draw, length in zip(draws, lengths[mesh.data_rank], strict=True)]
        cut = [length == 3 for length in lengths[mesh.data_rank]]
        return model_scores(run, sequences, tokens_per_microbatch=16, truncated=cut).totals.tolist()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_models_scores_are_those_of_each_sequence_alone() -> None:
    lengths = [5, 3, 9, 16, 1, 7]
    alone = [pool(2).run(scores_by_model, "tp=2", [[length]])[0][0] for length in lengths]
    assert [math.isnan(value) for value in alone] == [length == 3 for length in lengths]
    together = pool(2).run(scores_by_model, "dp_shard=2", [[], lengths])
    assert together[0] == []
    assert together[1] == pytest.approx(alone, rel=TOL_FP64_SUM, nan_ok=True)
    assert len({round(value, 6) for value in alone if value == value}) == 5
    with pytest.raises(RankError, match="takes 17 tokens, but a microbatch holds tokens_per_microbatch=16"):
        pool(1).run(scores_by_model, "", [[17]])
