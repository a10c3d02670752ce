"""What DAPO does to rollouts before its loss: dynamic sampling and the overlong penalty, the same on every mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

import meshkit as mk
from meshkit.algos.policy import DAPO, PRESETS, ROLLOUT_RULES, Clip, RolloutRules, step_rollouts
from meshkit.algos.rewards import MeshScores, Scores, score, score_on_mesh
from meshkit.algos.rollout import Rollout
from tests.world import pool

PROMPTS, SAMPLES = 3, 2
SCORES = [(0, 0), (1, 0), (1, 1), (0, 0), (1, math.nan), (0, 1), (1, 0), (0, 1), (1, 0)]
"""of both rollouts to each prompt: three prompts a round, of which 1 and 5, then 6, 7 and 8 are informative"""


def of_prompt(rollout: Rollout) -> float:
    return float(rollout.text)


def rollouts_of(key: int) -> list[Rollout]:
    return [Rollout(ids=np.arange(2 + key), text=str(SCORES[key][sample]), key=key) for sample in range(SAMPLES)]


def stepped(axes: str, rules: RolloutRules, rounds: int) -> tuple[list[tuple[int, float]], int, int, float, dict, int]:
    mesh, asked = mk.init_mesh(axes), []

    def ask() -> MeshScores:
        first = PROMPTS * len(asked)
        asked.append(first)
        own = range(first, first + PROMPTS)[mesh.data_rank :: mesh.data_ranks]  # two prompts and one
        return score_on_mesh(mesh, [each for key in own for each in rollouts_of(key)], scorer)

    scores, kept = step_rollouts(mesh, ask, rules, prompts=PROMPTS, max_new_tokens=4, rounds=rounds)
    found = [(each.key, each.reward) for each in kept]
    assert len(scores.local.values) == len(scores.rollouts)
    return found, len(asked), scores.answers, scores.mean, scores.unscored, scores.tokens


def scorer(rollouts: Sequence[Rollout]) -> Scores:
    return score(rollouts, of_prompt)


@pytest.mark.parametrize(("ranks", "axes"), [(1, ""), (2, "dp_shard=2"), (2, "tp=2")])
def test_dynamic_sampling_asks_until_enough_groups_have_different_scores(ranks: int, axes: str) -> None:
    results = pool(ranks).run(stepped, axes, RolloutRules(dynamic=True), 10)
    found = [each for own, *_ in results[: 1 if axes == "tp=2" else None] for each in own]
    assert sorted(found) == [(1, 0), (1, 1), (5, 0), (5, 1), (6, 0), (6, 1)]  # the first three, on whatever rank
    for _, asked, answers, mean, unscored, tokens in results:
        assert (asked, answers, unscored) == (3, 18, {"not finite": 1})
        assert tokens == 2 * sum(2 + key for key in range(9))
        assert mean == pytest.approx(8 / 17)


def test_dynamic_sampling_ends_after_so_many_rounds_with_what_there_is() -> None:
    for rounds, keys in ((1, {1}), (2, {1, 5})):
        (found, asked, *_) = pool(1).run(stepped, "", RolloutRules(dynamic=True), rounds)[0]
        assert asked == rounds and {key for key, _ in found} == keys


def test_without_rules_rollouts_stay_as_they_are() -> None:
    found, asked, answers, *_ = pool(1).run(stepped, "", RolloutRules(), 10)[0]
    assert asked == 1 and answers == 6
    assert found == [(key, score) for key in range(3) for score in SCORES[key]]


def test_long_answers_cost_reward_after_their_scores_are_compared() -> None:
    """Four tokens are expected and one more allowed: prompt 2's have four, 3's would have the fifth at the full price."""
    rules = RolloutRules(dynamic=True, overlong=0.25)
    assert rules.limit(4) == 5 and rules.limit(16384) == 20480 and RolloutRules().limit(7) == 7
    found = pool(1).run(stepped, "", rules, 10)[0][0]
    assert sorted(found) == [(1, 0), (1, 1), (5, -1), (5, 0), (6, -1), (6, 0)]
    unruly = pool(1).run(stepped, "", RolloutRules(overlong=0.25), 10)[0][0]
    assert [reward for _, reward in unruly] == [0, 0, 1, 0, 1, 1]


def test_the_preset_dapo_has_all_of_dapo() -> None:
    """Clip-higher and a mean over tokens in the loss; dynamic sampling and the overlong penalty before it."""
    assert isinstance(DAPO.clip, Clip) and DAPO.clip.high > DAPO.clip.low
    assert DAPO.aggregation == "token_mean" and not DAPO.kl.coefficient
    assert ROLLOUT_RULES.keys() == PRESETS.keys()
    assert ROLLOUT_RULES["DAPO"] == RolloutRules(dynamic=True, overlong=0.25)
    assert all(rules == RolloutRules() for name, rules in ROLLOUT_RULES.items() if name != "DAPO")
