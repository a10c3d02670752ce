"""Advantages, losses, KL estimates and the critic's loss against what verl 0.9.1 computed in fp64 from fixed numbers.

tests/golden/verl_policy.json: verl's functions, called with the inputs of tests/golden/trl_policy.json. In cases with a
recursion `observed` is 0 where a tool wrote, and rewards are given at every token.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshkit.algos.policy import (
    DAPO,
    GMPO,
    GRPO,
    GSPO_TOKEN,
    KL,
    REINFORCE,
    SAPO,
    Cispo,
    Clip,
    GroupAdvantage,
    PolicyLoss,
    SegmentIndex,
    gae,
    group_advantages,
    kl_estimates,
    policy_loss,
    rewards_to_go,
    value_losses,
    whiten,
)

TOL = 1e-7  # verl adds 1e-8 to the counts it divides by
FOLDER = Path(__file__).parents[2] / "golden"
INPUTS = json.loads((FOLDER / "trl_policy.json").read_text())["inputs"]
CASES: dict[str, Any] = json.loads((FOLDER / "verl_policy.json").read_text())["cases"]
MASK, GROUPS = torch.tensor(INPUTS["mask"]).bool(), torch.tensor(INPUTS["group"])


def number(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


REWARDS, OLD, REF = (number(INPUTS[name]) for name in ("rewards", "old_logps", "ref_logps"))
ANSWERS = SegmentIndex.of_rows(MASK)
DUAL = Clip(low=0.2, high=0.28, dual=3.0)


@pytest.mark.parametrize(
    ("name", "advantage"),
    [
        ("grpo", GroupAdvantage(baseline="group", scale="group", epsilon=1e-6)),
        ("rloo", GroupAdvantage(baseline="leave_one_out")),
        ("opo", GroupAdvantage(baseline="length_weighted")),
        ("remax", GroupAdvantage(baseline="greedy")),
    ],
)
def test_advantages_of_answers_equal_verl(name: str, advantage: GroupAdvantage) -> None:
    found = group_advantages(REWARDS, GROUPS, advantage, lengths_A=MASK.sum(1), greedy_A=number(CASES["greedy"]))
    assert (found.advantages - number(CASES[name])).abs().max() < TOL


def test_advantages_of_tokens_equal_verl() -> None:
    """With a tool's tokens between the policy's, over which the recursions pass."""
    rewards, observed, values = (number(CASES[name]) for name in ("rewards", "observed", "values"))
    learn, rows = observed.bool(), torch.arange(1, 9).unsqueeze(1).expand(8, 12)
    found = gae(rewards, values, learn, rows, discount=0.97, decay=0.9)
    advantages, returns = (number(one) for one in CASES["gae"])
    assert (whiten(found.advantages, learn) - advantages)[learn].abs().max() < TOL
    assert (found.returns - returns)[learn].abs().max() < TOL
    togo = rewards_to_go(rewards, learn, rows, discount=0.97)
    white, plain = (number(one) for one in CASES["reinforce_pp"])
    assert (togo - plain)[learn].abs().max() < TOL and (whiten(togo, learn) - white)[learn].abs().max() < TOL
    baseline = group_advantages(REWARDS, GROUPS, GroupAdvantage(baseline="group")).advantages
    spread = whiten(ANSWERS.spread(baseline), MASK)
    assert (spread - number(CASES["reinforce_pp_baseline"])).abs().max() < TOL


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("vanilla/token-mean", replace(DAPO, clip=DUAL)),
        ("vanilla/seq-mean-token-sum", replace(DAPO, clip=DUAL, aggregation="sequence_sum")),
        ("vanilla/seq-mean-token-mean", replace(GRPO, clip=DUAL, kl=KL())),
        ("geo_mean/seq-mean-token-mean", GMPO),
        ("cispo/token-mean", replace(DAPO, clip=Cispo(low=0.8, high=1.28))),
        ("sapo/seq-mean-token-mean", SAPO),
        ("gspo/seq-mean-token-mean", GSPO_TOKEN),
        ("gpg/token-mean", replace(REINFORCE, aggregation="token_mean")),
    ],
)
def test_losses_and_gradients_equal_verl(name: str, loss: PolicyLoss) -> None:
    case, given = CASES[f"loss/{name}"], number(INPUTS["logps"]).requires_grad_()
    of_tokens = number(INPUTS["token_advantages"])
    advantages = ANSWERS.spread(number(INPUTS["advantages"])) if loss is GMPO else of_tokens
    values = policy_loss(loss, ANSWERS, given, advantages, old_log_probs=OLD)
    total = values.losses.sum() / (MASK.sum() if loss.counts_tokens else 8)
    total.backward()
    assert abs(total.item() - case["loss"]) < TOL
    assert (given.grad - number(case["grad"])).abs().max() < TOL


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+"])
def test_kl_and_its_gradient_equal_verl(estimator: str) -> None:
    case, given = CASES[f"kl/{estimator}"], number(INPUTS["logps"]).requires_grad_()
    total = (kl_estimates(given, REF, estimator) * MASK).sum()
    total.backward()
    assert abs(total.item() - case["sum"]) < TOL and (given.grad - number(case["grad"])).abs().max() < TOL


def test_the_loss_of_a_critic_equals_verl() -> None:
    given = number(CASES["values"]).requires_grad_()
    targets, old = number(INPUTS["token_advantages"]), number(CASES["old_values"])
    total = value_losses(given, targets, ANSWERS, old_values=old, clip=0.2).losses.sum() / MASK.sum()
    total.backward()
    assert abs(total.item() - CASES["value"]["loss"]) < TOL
    assert (given.grad - number(CASES["value"]["grad"])).abs().max() < TOL
