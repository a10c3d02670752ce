"""Policy losses against TRL 1.16: loss, every token's gradient, clip fractions; advantages; and numbers of other libraries.

tests/golden/trl_policy.json holds what GRPOTrainer and RLOOTrainer computed in fp64 from fixed log-probabilities: two groups
of four answers of 1 to 12 tokens.
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
    GRPO,
    KL,
    PRESETS,
    RLOO,
    VESPO,
    Cispo,
    Clip,
    GroupAdvantage,
    OffPolicyMask,
    PolicyLoss,
    PolicyValues,
    Sapo,
    SegmentIndex,
    group_advantages,
    high_entropy,
    policy_loss,
)
from meshkit.loss import token_log_probs

TOL = 1e-12  # the order of operations
TOL_FP32 = 1e-6  # TRL takes means of clip fractions in fp32
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "trl_policy.json").read_text())
CASES: dict[str, Any] = GOLDEN["cases"]
LOSSES = [name for name in CASES if name.startswith("grpo/") and "advantages" not in name]
MASK = torch.tensor(GOLDEN["inputs"]["mask"]).bool()
OLD, REF, ENTROPY, ADVANTAGES, REWARDS, LOGITS = (
    torch.tensor(GOLDEN["inputs"][name], dtype=torch.float64)
    for name in ("old_logps", "ref_logps", "entropies", "advantages", "rewards", "logits")
)
GROUPS = torch.tensor(GOLDEN["inputs"]["group"])
AGGREGATIONS = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "dr_grpo": "constant",
    "luspo": "sequence_sum",
}  # the others: token_mean
CLIPS = {"cispo": Cispo(high=5.0), "sapo": Sapo(positive=1.0, negative=1.05), "vespo": VESPO.clip}


def log_probs() -> Tensor:
    return torch.tensor(GOLDEN["inputs"]["logps"], dtype=torch.float64, requires_grad=True)


def choices(args: dict[str, Any]) -> PolicyLoss:
    kind = args["loss_type"]
    aggregation = AGGREGATIONS.get(kind, "token_mean")
    return PolicyLoss(
        ratio="trajectory" if kind == "vespo" else args["level"],
        clip=CLIPS.get(kind, Clip(low=args["eps_low"], high=args["eps_high"], dual=args["delta"])),
        aggregation=aggregation,
        max_tokens=args["max_completion_length"] if aggregation == "constant" else None,
        kl=KL(estimator="k3", coefficient=args["beta"], weighted=args["bias_kl"]),
        corrections=() if args["opsm"] is None else (OffPolicyMask(threshold=args["opsm"]),),
    )


def objective(loss: PolicyLoss, values: PolicyValues) -> Tensor:
    return values.losses.sum() / (MASK.sum() if loss.counts_tokens else len(MASK))


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_equal_trl(name: str) -> None:
    case, given = CASES[name], log_probs()
    args, loss = case["args"], choices(case["args"])
    answers = SegmentIndex.of_rows(MASK)
    weights = None
    if args["quantile"] < 1:
        weights = (high_entropy(ENTROPY[MASK].float(), args["quantile"]) <= ENTROPY).double()
    values = policy_loss(
        loss,
        answers,
        given,
        answers.spread(ADVANTAGES),
        old_log_probs=OLD if args["old"] else None,
        reference_log_probs=REF if args["beta"] else None,
        weights=weights,
    )
    total = objective(loss, values)
    total.backward()
    # TRL's bonus is a mean over tokens whatever the loss is; ours is aggregated as the rest. Here it has no gradient.
    bonus = args["entropy_coef"] * ENTROPY[MASK].mean().item()
    assert abs(total.item() - bonus - case["loss"]) <= TOL
    assert (given.grad - torch.tensor(case["grad_logps"], dtype=torch.float64)).abs().max() <= TOL
    metrics = case["metrics"]
    for side, clipped in (("low", values.clipped_low), ("high", values.clipped_high)):
        if (name_ := f"clip_ratio/{side}_mean") in metrics:
            per_answer = args["level"] == "sequence"
            found = clipped.double().amax(1).mean() if per_answer else clipped.sum() / MASK.sum()
            assert abs(found.item() - metrics[name_]) <= TOL_FP32
    if "kl" in metrics:
        assert abs((values.kl.sum() / MASK.sum()).item() - metrics["kl"]) <= TOL_FP32


def test_every_case_of_trl_is_used() -> None:
    assert len(LOSSES) == 36 and len(CASES) == 36 + 3 + 1 + 2


def test_rloo_equals_trl() -> None:
    given, answers = log_probs(), SegmentIndex.of_rows(MASK)
    values = policy_loss(RLOO, answers, given, answers.spread(ADVANTAGES), old_log_probs=OLD)
    total = objective(RLOO, values)
    total.backward()
    assert abs(total.item() - CASES["rloo"]["loss"]) <= TOL
    assert (given.grad - torch.tensor(CASES["rloo"]["grad_logps"], dtype=torch.float64)).abs().max() <= TOL


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_of_groups_equal_trl(scale: Any) -> None:
    found = group_advantages(REWARDS, GROUPS, GroupAdvantage(scale=scale, epsilon=1e-4)).advantages
    assert (found - torch.tensor(CASES[f"grpo/advantages/{scale}"]["out"], dtype=torch.float64)).abs().max() <= 1e-7


def test_log_probs_and_entropy_equal_trl() -> None:
    found = token_log_probs(LOGITS, torch.tensor(GOLDEN["inputs"]["targets"]))
    for values, name in ((found.log_probs, "selective_log_softmax"), (found.entropy, "entropy_from_logits")):
        assert (values - torch.tensor(CASES[name]["out"], dtype=torch.float64)).abs().max() <= TOL


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        # OpenRLHF's PolicyLoss and verl's "vanilla", token mean, dual clip
        (replace(PRESETS["DAPO"], clip=Clip(low=0.2, high=0.28, dual=3.0)), 0.2589431939),
        # OpenRLHF's and verl's "gspo", mean of answers
        (replace(GRPO, ratio="sequence", clip=Clip(low=0.2, high=0.28), kl=KL()), 0.2430942504),
    ],
    ids=["dual-clip", "gspo"],
)
def test_losses_equal_what_several_libraries_say(loss: PolicyLoss, expected: float) -> None:
    token_advantages = torch.tensor(GOLDEN["inputs"]["token_advantages"], dtype=torch.float64)
    values = policy_loss(loss, SegmentIndex.of_rows(MASK), log_probs(), token_advantages, old_log_probs=OLD)
    assert abs(objective(loss, values).item() - expected) <= 1e-9
