"""Preference and unpaired objectives against TRL 1.16: loss, every token's gradient, rewards; and numbers of other libraries.

tests/golden/trl_preference.json holds what TRL's trainers computed in fp64 from fixed log-probabilities: 8 sequences of up to
12 tokens, of which 0 to 3 are chosen and 4 to 7 rejected.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshkit.algos.preference import (
    Pairs,
    PreferenceLoss,
    UnpairedLoss,
    aligned_logps,
    answer_positions,
    aot_partners,
    aot_unpaired_partners,
    desensitised_logps,
    mean_of,
    preference_loss,
    sequence_logps,
    sum_and_count,
    unpaired_loss,
    wpo_weights,
)
from meshkit.algos.sft import sft_losses

TOL_FP64 = 1e-14  # the order of operations; losses up to 51
TOL_FP32 = 1e-6  # for the one case that TRL can only compute in fp32
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "trl_preference.json").read_text())
CASES: dict[str, Any] = GOLDEN["cases"]
MASK = torch.tensor(GOLDEN["inputs"]["mask"])
REF, LOG_SUM_SQUARES = (
    torch.tensor(GOLDEN["inputs"][name], dtype=torch.float64) for name in ("ref_logps", "log_sum_sq")
)
KINDS = {  # TRL's name: ours
    "ipo": {"kind": "ipo_mean"},
    "exo_pair": {"kind": "exo"},
    "nca_pair": {"kind": "nca"},
    "bco_pair": {"kind": "bco"},
    "sppo_hard": {"kind": "sppo"},
    "sigmoid_norm": {"kind": "sigmoid", "average": True},
}
SMOOTHED = ("sigmoid", "robust", "exo", "aot", "aot_unpaired")
DIVERGENCES = {"js_divergence": "js", "alpha_divergence": "alpha"}


def logps() -> Tensor:
    return torch.tensor(GOLDEN["inputs"]["logps"], dtype=torch.float64, requires_grad=True)


def losses_of(args: dict[str, Any]) -> list[PreferenceLoss]:
    found = []
    for name, weight in zip(args["loss_types"], args["loss_weights"] or [1.0] * 3, strict=False):
        options: dict[str, Any] = {"weight": weight, **KINDS.get(name, {"kind": name})}
        if name != "sft":
            options["beta"] = args["beta"]
        if options["kind"] in SMOOTHED:
            options["label_smoothing"] = args["label_smoothing"]
        if options["kind"] == "discopop":
            options["tau"] = args["tau"]
        if args["f"] != "reverse_kl":
            options["divergence"] = DIVERGENCES.get(args["f"], args["f"])
        if options.get("divergence") == "alpha":
            options["alpha"] = args["fcoef"]
        found.append(PreferenceLoss(**options))
    return found


def pairs_of(logps_NT: Tensor, args: dict[str, Any]) -> Pairs:
    tokens = MASK.sum(1)
    if args["ld_alpha"] is None:
        policy, ref = sequence_logps(logps_NT, MASK), sequence_logps(REF, MASK)
    else:
        shared = torch.minimum(*tokens.chunk(2)).repeat(2)
        policy, ref = (
            desensitised_logps(values, answer_positions(MASK), shared, alpha=args["ld_alpha"])
            for values in (logps_NT, REF)
        )
    (chosen, rejected), (ref_chosen, ref_rejected) = policy.chunk(2), ref.chunk(2)
    partners = None
    if args["loss_types"] == ["aot"]:
        partners = aot_partners(chosen - rejected, ref_chosen - ref_rejected)
    elif args["loss_types"] == ["aot_unpaired"]:
        partners = aot_unpaired_partners(chosen - ref_chosen, rejected - ref_rejected)
    weights = None
    if args["wpo"]:
        aligned, lengths = aligned_logps(logps_NT, LOG_SUM_SQUARES, MASK).chunk(2), tokens.chunk(2)
        weights = wpo_weights(aligned[0], lengths[0], aligned[1], lengths[1])
    return Pairs(
        chosen=chosen,
        rejected=rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        chosen_tokens=tokens[:4],
        rejected_tokens=tokens[4:],
        weights=weights,
        partners=partners,
        tokens_per_pair=mean_of(sum_and_count(tokens[:4])),
    )


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("dpo/")])
def test_loss_gradient_and_rewards_of_pairs_equal_trl(name: str) -> None:
    case, given = CASES[name], logps()
    tolerance = TOL_FP32 if "fp32" in name else TOL_FP64
    values = preference_loss(pairs_of(given, case["args"]), *losses_of(case["args"]))
    loss = values.losses.sum() / 4
    loss.backward()
    assert abs(loss.item() - case["loss"]) <= tolerance
    assert (given.grad - torch.tensor(case["grad_logps"], dtype=torch.float64)).abs().max() <= tolerance
    assert abs(values.margins.mean().item() - case["reward_margin"]) <= tolerance
    assert values.accuracies.mean().item() == case["reward_acc"]


# TRL's case has the mean log-ratio of other sequences as its reference point, which the file does not record. This is the one
# number that gives the recorded loss; the eight gradients, which depend on it in another way, are the test.
KTO_POINT = 0.8523680463324744


@pytest.mark.parametrize(("kind", "point"), [("kto", KTO_POINT), ("apo_zero_unpaired", None)])
def test_loss_and_gradient_of_answers_equal_trl(kind: str, point: float | None) -> None:
    case, given = CASES[f"kto/{kind}"], logps()
    desirable = torch.arange(8) < 4
    loss = UnpairedLoss(kind=kind, beta=0.1, undesirable_weight=1.33)
    values = unpaired_loss(
        sequence_logps(given, MASK), sequence_logps(REF, MASK), desirable, loss, reference_point=point
    )
    values.losses.sum().div(8).backward()
    assert abs(values.losses.mean().item() - case["loss"]) <= TOL_FP64
    assert (given.grad - torch.tensor(case["grad_logps"], dtype=torch.float64)).abs().max() <= TOL_FP64


def test_sft_of_the_chosen_answers_equals_trl() -> None:
    case, given = CASES["dpo/sft"], logps()
    loss = sft_losses(given[:4], MASK[:4]).sum() / MASK[:4].sum()
    loss.backward()
    assert abs(loss.item() - case["loss"]) <= TOL_FP64
    assert (given.grad - torch.tensor(case["grad_logps"], dtype=torch.float64)).abs().max() <= TOL_FP64


@pytest.mark.parametrize(
    ("options", "expected", "tolerance"),
    [
        ({"kind": "sigmoid"}, 0.6615357864, 1e-9),  # TRL, torchtune and OpenRLHF
        ({"kind": "hinge"}, 0.9128379718, 1e-9),  # TRL, and torchtune's RSOLoss
        ({"kind": "sigmoid", "label_smoothing": 0.1}, 0.6702519892, 1e-9),  # cDPO: torchtune and OpenRLHF
        ({"kind": "ipo_sum"}, 25.92, 0.005),  # OpenRLHF, recorded with two decimals; TRL's ipo is 25.22
    ],
)
def test_losses_equal_what_several_libraries_say(options: dict[str, Any], expected: float, tolerance: float) -> None:
    pairs = pairs_of(logps(), CASES["dpo/sigmoid"]["args"])
    assert abs(preference_loss(pairs, PreferenceLoss(**options)).losses.mean().item() - expected) <= tolerance
