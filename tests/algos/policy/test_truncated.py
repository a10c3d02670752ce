"""Answers that were cut off: GAE keeps what they earned, and a step of nothing else teaches nobody; against the recursion."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import meshkit as mk
from meshkit.algos.policy import GAE, PPO, PolicyLoss, pack_rollouts, step_advantages
from meshkit.algos.policy._step_advantages import StepAdvantages
from meshkit.algos.rollout import Rollout
from tests.world import pool

TOL_FP64_SUM = 1e-10  # only the order of sums differs
VALUES = [0.3, -0.2, 0.5, 0.1]
LOSS = PolicyLoss(advantage=GAE(discount=0.9, decay=0.8, whiten=False, bootstrap=True))


def step(rewards: list[float | list[float]], truncated: list[bool], loss: PolicyLoss) -> tuple[StepAdvantages, object]:
    """Answers of four tokens after a prompt of two, each with VALUES, one a row, shared by the data ranks."""
    mesh = mk.init_mesh("dp_replicate=-1")
    given = list(enumerate(zip(rewards, truncated, strict=True)))[mesh.data_rank :: mesh.data_ranks]
    written = [
        Rollout(
            ids=np.arange(4),
            prompt_ids=np.array([1, 2]),
            log_probs=np.zeros(4),
            key=key,
            reward=np.array(reward) if isinstance(reward, list) else reward,
            truncated=cut,
            values={"old_values": np.array([0, 0, *VALUES])},
        )
        for key, (reward, cut) in given
    ]
    batch = pack_rollouts(written, seq_len=8, values=["old_values"])
    return step_advantages(mesh, batch, loss), batch["old_values"] * (batch["labels"] != -100)


def gae_of(rewards: list[float], after: float) -> list[float]:
    found, ahead = [], 0.0
    for t in reversed(range(4)):
        ahead = rewards[t] + 0.9 * (after if t == 3 else VALUES[t + 1]) - VALUES[t] + 0.9 * 0.8 * ahead
        found.insert(0, ahead)
    return found


def test_rewards_earned_before_a_truncation_count() -> None:
    """What tokens got stays, and the value of the last state, here 0, comes after it; a score of the whole does not stay."""
    ((found, _),) = pool(1).run(step, [[0.0, 0.5, 0.0, 0.25], [0.0, 0.5, 0.0, 2.0]], [True, False], LOSS)
    first, second = found.values["advantages"][found.values["advantages"] != 0].view(2, 4).tolist()
    assert first == pytest.approx(gae_of([0.0, 0.5, 0.0, 0.25], 0.0), rel=TOL_FP64_SUM)
    assert second == pytest.approx(gae_of([0.0, 0.5, 0.0, 2.0], 0.0), rel=TOL_FP64_SUM)
    assert (found.truncated, found.answers) == (1, 2)


def test_a_step_of_truncated_answers_alone_trains_nobody_on_the_critics_noise() -> None:
    for found, values in pool(2).run(step, [1.0, 0.0, 1.0], [True] * 3, PPO_WITHOUT_KL):
        assert found.truncated == 3 and not found.values["advantages"].any()
        assert torch.equal(found.values["returns"], values)  # so that the value loss is 0


def test_what_one_rank_earned_teaches_all_of_them() -> None:
    for found, _ in pool(2).run(step, [1.0, 0.0, 1.0], [True, True, False], PPO_WITHOUT_KL):
        assert found.values["advantages"].any()


PPO_WITHOUT_KL = PolicyLoss(advantage=PPO.advantage)
