"""What objectives refuse, and what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshkit.algos.preference import (
    Pairs,
    PreferenceLoss,
    UnpairedLoss,
    aot_partners,
    bradley_terry,
    desensitised_logps,
    haf,
    pcrm,
    preference_loss,
    unpaired_loss,
)
from meshkit.algos.sft import sft_losses
from meshkit.errors import DataError, PlanError

X = torch.zeros(3)
FULL = Pairs(chosen=X, rejected=X, ref_chosen=X, ref_rejected=X, chosen_tokens=X, rejected_tokens=X)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kind": "ipo"}, "kind='ipo' is not known. Did you mean 'ipo_sum' or 'ipo_mean'. Choose from sigmoid, robust"),
        ({"kind": "sigmod"}, "Did you mean 'sigmoid'"),
        ({"kind": "zzz"}, "is not known. Choose from sigmoid"),
        ({"kind": "hinge", "label_smoothing": 0.1}, "'hinge' has no use for label_smoothing=0.1. It takes beta, diver"),
        ({"kind": "sft", "beta": 0.2}, "'sft' has no use for beta=0.2. It takes only a weight"),
        ({"kind": "orpo", "margin": 1.0, "tau": 0.1}, "no use for tau=0.1, margin=1.0"),
        ({"kind": "nca", "divergence": "js"}, "no use for divergence='js'"),
        ({"divergence": "kl"}, "divergence='kl' is not known. Did you mean 'reverse_kl' or 'forward_kl'"),
        ({"alpha": 0.3}, "alpha=0.3 is for divergence='alpha'"),
        ({"beta": 0.0}, "beta=0.0 removes"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5 is the share of wrong labels"),
        ({"kind": "exo"}, "infinite for label_smoothing=0"),
        ({"kind": "discopop", "tau": 2.0}, "tau=2.0 gives a loss that grows without end"),
    ],
)
def test_losses_that_mean_nothing_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        PreferenceLoss(**options)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("sigmoid", "kind='sigmoid' compares with a reference, but Pairs has none"),
        ("simpo", "kind='simpo' averages over tokens. Give Pairs chosen_tokens"),
        ("sft", "kind='sft' is the mean over the chosen tokens of the step"),
        ("aot", "kind='aot' compares sorted values of the whole step. Give Pairs the partners that aot_partners finds"),
    ],
)
def test_a_loss_names_what_pairs_lack(kind: str, match: str) -> None:
    with pytest.raises(DataError, match=match):
        preference_loss(Pairs(chosen=X, rejected=X), PreferenceLoss(kind=kind))


def test_pairs_and_losses_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match=r"'chosen': \(3,\), 'rejected': \(2,\)"):
        Pairs(chosen=X, rejected=X[:2])
    with pytest.raises(DataError, match="one number for each pair; sum over tokens before"):
        Pairs(chosen=torch.zeros(3, 4), rejected=torch.zeros(3, 4))
    with pytest.raises(DataError, match=r"it has \(3,\)"):
        preference_loss(
            Pairs(chosen=X, rejected=X, ref_chosen=X, ref_rejected=X, partners=X), PreferenceLoss(kind="aot_unpaired")
        )
    with pytest.raises(PlanError, match="no loss. Give at least one"):
        preference_loss(FULL)
    weighted = Pairs(chosen=X, rejected=X, ref_chosen=X, ref_rejected=X, partners=X, weights=X)
    with pytest.raises(PlanError, match="Pairs has weights, but kind='aot' sorts the step"):
        preference_loss(weighted, PreferenceLoss(kind="aot"))
    with pytest.raises(DataError, match=r"\(3,\) and \(2,\) values"):
        aot_partners(X, X[:2])


def test_unpaired_losses_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match="kind='kt0' is not known. Did you mean 'kto'"):
        UnpairedLoss(kind="kt0")
    with pytest.raises(PlanError, match="undesirable_weight=-1"):
        UnpairedLoss(undesirable_weight=-1)
    with pytest.raises(PlanError, match="beta=0"):
        UnpairedLoss(beta=0)
    with pytest.raises(DataError, match="kind='kto' with reference_point=None. Give kto_kl"):
        unpaired_loss(X, X, X > 0, UnpairedLoss())
    with pytest.raises(DataError, match="reference_point=1.0. Leave it out"):
        unpaired_loss(X, X, X > 0, UnpairedLoss(kind="apo_zero_unpaired"), reference_point=1.0)
    with pytest.raises(DataError, match=r"'desirable': \(2,\)"):
        unpaired_loss(X, X, X[:2] > 0, UnpairedLoss(), reference_point=0.0)


def test_tokens_and_scores_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match=r"log-probabilities \(2, 3\) and mask \(2, 2\) differ"):
        sft_losses(torch.zeros(2, 3), torch.zeros(2, 2))
    with pytest.raises(PlanError, match="alpha=1.5 is the share"):
        desensitised_logps(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1), alpha=1.5)
    with pytest.raises(DataError, match=r"'margin': \(1,\)"):
        bradley_terry(X, X, margin_N=X[:1])
    with pytest.raises(PlanError, match="center=-1"):
        bradley_terry(X, X, center=-1)
    with pytest.raises(PlanError, match="scale=0, floor=0.001 give no finite upper limit"):
        pcrm(X, X, X, scale=0)
    with pytest.raises(PlanError, match="alpha=-1 would train"):
        haf(bradley_terry(X, X), X, alpha=-1)
