"""Objectives against closed forms in plain Python floats, one pair after the other, and against published gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshkit.algos.preference import (
    Pairs,
    PreferenceLoss,
    RewardValues,
    UnpairedLoss,
    angular_similarity,
    answer_positions,
    bradley_terry,
    desensitised_logps,
    haf,
    length_ratio,
    log_sum_squares,
    pcrm,
    preference_loss,
    sequence_logps,
    unpaired_loss,
    wpo_weights,
)
from meshkit.algos.sft import dft_losses, sft_losses

TOL = 1e-12  # only the order of fp64 operations differs
N = 5


def uniform(low: float, high: float, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64) * (high - low) + low


def example() -> Pairs:
    return Pairs(
        chosen=uniform(-9, -1, N, seed=0).requires_grad_(),
        rejected=uniform(-9, -1, N, seed=1).requires_grad_(),
        ref_chosen=uniform(-9, -1, N, seed=2),
        ref_rejected=uniform(-9, -1, N, seed=3),
        chosen_tokens=torch.tensor([3, 1, 7, 4, 2]),
        rejected_tokens=torch.tensor([5, 2, 1, 9, 6]),
        reward_shift=0.3,
    )


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def log_odds(p: float) -> float:
    return math.log(p / (1 - p))


def alpha_score(x: float, alpha: float) -> float:
    return (math.exp(x) ** (alpha - 1) - 1) / (alpha - 1)


# Of (w, r, log pi(y_w), log pi(y_l), tokens of y_w, tokens of y_l), with w and r the log-ratios.
Formula = Callable[[float, float, float, float, float, float], float]
FORMULAS: list[tuple[dict[str, Any], Formula]] = [
    ({"kind": "ipo_sum", "beta": 0.2}, lambda w, r, a, b, m, n: (w - r - 2.5) ** 2),
    ({"kind": "ipo_mean", "beta": 0.2}, lambda w, r, a, b, m, n: (w / m - r / n - 2.5) ** 2),
    (
        {"kind": "sigmoid", "beta": 0.7, "average": True, "label_smoothing": 0.2},
        lambda w, r, a, b, m, n: -0.8 * log_sigmoid(0.7 * (w / m - r / n)) - 0.2 * log_sigmoid(-0.7 * (w / m - r / n)),
    ),
    (
        {"kind": "hinge", "beta": 0.7, "divergence": "forward_kl"},
        lambda w, r, a, b, m, n: max(0.0, 1 - 0.7 * (math.exp(-r) - math.exp(-w))),
    ),
    (
        {"kind": "robust", "beta": 0.7, "divergence": "alpha", "alpha": 1.5, "label_smoothing": 0.1},
        lambda w, r, a, b, m, n: (
            -(
                0.9 * log_sigmoid(0.7 * (alpha_score(w, 1.5) - alpha_score(r, 1.5)))
                - 0.1 * log_sigmoid(-0.7 * (alpha_score(w, 1.5) - alpha_score(r, 1.5)))
            )
            / 0.8
        ),
    ),
    (
        {"kind": "sigmoid", "divergence": "js", "beta": 0.7},
        lambda w, r, a, b, m, n: (
            -log_sigmoid(
                0.7 * (math.log(2 * math.exp(w) / (1 + math.exp(w))) - math.log(2 * math.exp(r) / (1 + math.exp(r))))
            )
        ),
    ),
    (
        {"kind": "bco", "beta": 0.7},
        lambda w, r, a, b, m, n: -log_sigmoid(0.7 * w - 0.3) - log_sigmoid(0.3 - 0.7 * r),
    ),
    (
        {"kind": "orpo", "beta": 0.7},
        lambda w, r, a, b, m, n: -a / m - 0.7 * log_sigmoid(log_odds(math.exp(a / m)) - log_odds(math.exp(b / n))),
    ),
    (
        {"kind": "simpo", "beta": 2.0, "margin": 0.5},
        lambda w, r, a, b, m, n: -log_sigmoid(2 * a / m - 2 * b / n - 0.5),
    ),
    (
        {"kind": "simpo", "beta": 2.0, "margin": 0.5, "label_smoothing": 0.1},
        lambda w, r, a, b, m, n: (
            -0.9 * log_sigmoid(2 * a / m - 2 * b / n - 0.5) - 0.1 * log_sigmoid(-2 * a / m + 2 * b / n + 0.5)
        ),
    ),
    ({"kind": "nll", "weight": 0.4}, lambda w, r, a, b, m, n: -0.4 * a / m),
]


@pytest.mark.parametrize(
    ("options", "formula"), FORMULAS, ids=[f"{options['kind']}-{n}" for n, (options, _) in enumerate(FORMULAS)]
)
def test_each_pair_has_the_loss_of_the_formula(options: dict[str, Any], formula: Formula) -> None:
    pairs = example()
    assert pairs.ref_chosen is not None and pairs.ref_rejected is not None
    columns = [
        pairs.chosen - pairs.ref_chosen,
        pairs.rejected - pairs.ref_rejected,
        pairs.chosen,
        pairs.rejected,
        pairs.chosen_tokens,
        pairs.rejected_tokens,
    ]
    rows = zip(*(column.tolist() for column in columns if column is not None), strict=True)
    expected = torch.tensor([formula(*row) for row in rows], dtype=torch.float64)
    assert (preference_loss(pairs, PreferenceLoss(**options)).losses - expected).abs().max() < TOL


def test_dpo_gradient_is_that_of_the_paper() -> None:
    """Rafailov et al. 2023, section 4: -beta sigma(r_l - r_w) on log pi(y_w), and the opposite on log pi(y_l)."""
    pairs = example()
    values = preference_loss(pairs, PreferenceLoss(kind="sigmoid", beta=0.3))
    values.losses.sum().backward()
    weights = [-0.3 / (1 + math.exp(margin)) for margin in values.margins.tolist()]
    assert (pairs.chosen.grad - torch.tensor(weights, dtype=torch.float64)).abs().max() < TOL
    assert torch.equal(pairs.chosen.grad, -pairs.rejected.grad)


def test_a_policy_that_is_its_reference_has_the_known_losses() -> None:
    same = uniform(-9, -1, N, seed=0)
    pairs = Pairs(chosen=same, rejected=same, ref_chosen=same, ref_rejected=same)
    known = {"sigmoid": math.log(2), "hinge": 1, "ipo_sum": 25, "sppo": 50, "nca": 2 * math.log(2), "apo_zero": 1}
    known |= {"bco": 2 * math.log(2), "apo_down": 1, "discopop": (1 + math.log(2)) / 2, "robust": math.log(2)}
    for kind, loss in known.items():
        values = preference_loss(pairs, PreferenceLoss(kind=kind))
        assert (values.losses - loss).abs().max() < TOL, kind
        assert values.margins.abs().max() == 0 and values.accuracies.sum() == 0


def test_rewards_are_those_of_the_reference_or_of_a_token() -> None:
    pairs = example()
    assert pairs.ref_chosen is not None
    values = preference_loss(pairs, PreferenceLoss(kind="hinge", beta=0.5))
    assert torch.equal(values.chosen_rewards, 0.5 * (pairs.chosen - pairs.ref_chosen).detach())
    free = Pairs(
        chosen=pairs.chosen,
        rejected=pairs.rejected,
        chosen_tokens=pairs.chosen_tokens,
        rejected_tokens=pairs.rejected_tokens,
    )
    values = preference_loss(free, PreferenceLoss(kind="simpo", beta=2.0))
    assert torch.equal(values.rejected_rewards, 2 * (pairs.rejected / free.rejected_tokens).detach())
    assert not values.chosen_rewards.requires_grad and values.losses.requires_grad


def test_the_reference_gets_no_gradient() -> None:
    ref = uniform(-9, -1, N, seed=2).requires_grad_()
    policy = uniform(-9, -1, N, seed=0).requires_grad_()
    pairs = Pairs(chosen=policy, rejected=policy * 2, ref_chosen=ref, ref_rejected=ref)
    preference_loss(pairs, PreferenceLoss()).losses.sum().backward()
    unpaired_loss(policy, ref, policy > -5, UnpairedLoss(), reference_point=0.0).losses.sum().backward()
    assert ref.grad is None and policy.grad is not None


# --------------------------------------------------------------------------------------------------------- tokens


def test_sft_and_dft_of_tokens() -> None:
    logps = uniform(-3, 0, 2, 4, seed=0).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 1, 0]])
    expected = [[-logps[n, t].item() * mask[n, t].item() for t in range(4)] for n in range(2)]
    assert torch.equal(sft_losses(logps, mask), torch.tensor(expected, dtype=torch.float64))
    losses = dft_losses(logps, mask)
    assert (losses - logps.exp() * torch.tensor(expected, dtype=torch.float64)).abs().max() < TOL
    losses.sum().backward()
    # the probability counts as a constant: without that the gradient would be -p (1 + log p)
    assert (logps.grad + logps.detach().exp() * mask).abs().max() < TOL


def test_what_is_masked_may_be_anything() -> None:
    logps = torch.tensor([[-1.0, math.nan], [math.inf, -2.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, True]])
    total = sft_losses(logps, mask).sum() + dft_losses(logps, mask).sum() + sequence_logps(logps, mask).sum()
    total = total + desensitised_logps(logps, answer_positions(mask), torch.tensor([1, 1]), alpha=0.5).sum()
    total.backward()
    assert total.isfinite() and logps.grad is not None and logps.grad.isfinite().all()
    assert logps.grad[0, 1] == logps.grad[1, 0] == 0


def test_bf16_log_probabilities_are_added_in_fp32() -> None:
    """In bf16 a sum of 1000 tokens of -1 would stop at -256."""
    assert sequence_logps(torch.full((1, 1000), -1.0, dtype=torch.bfloat16), torch.ones(1, 1000)).item() == -1000


def test_positions_count_the_answer_only() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 0, 0, 0, 0, 0]])
    assert answer_positions(mask).tolist() == [[0, 0, 1, 2, 0, 3], [1, 0, 0, 0, 0, 0]]


def test_desensitised_tokens_count_alpha_beyond_the_shared_length() -> None:
    logps = -torch.arange(1.0, 7.0, dtype=torch.float64).expand(2, 6)
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]])
    got = desensitised_logps(logps, answer_positions(mask), torch.tensor([2, 2]), alpha=0.25)
    assert got.tolist() == [-2 - 3 - 0.25 * 4 - 0.25 * 5, -3]


def test_wpo_weighs_a_pair_by_how_likely_its_tokens_are() -> None:
    logits = uniform(-3, 3, 1, 2, 4, seed=0)
    p = logits.softmax(-1)
    expected = [math.log(sum(share**2 for share in token)) for token in p[0].tolist()]
    assert (log_sum_squares(logits)[0] - torch.tensor(expected, dtype=torch.float64)).abs().max() < TOL
    got = wpo_weights(torch.tensor([-6.0]), torch.tensor([3]), torch.tensor([-2.0]), torch.tensor([4]))
    assert abs(got.item() - math.exp(-2) * math.exp(-0.5)) < TOL


# --------------------------------------------------------------------------------------------------------- reward


def test_bradley_terry_with_margin_ties_and_centring() -> None:
    chosen, rejected, margin = uniform(-2, 2, N, seed=0), uniform(-2, 2, N, seed=1), uniform(0, 1, N, seed=2)
    preference = torch.tensor([1.0, 0.5, 0.0, 1.0, 0.9])
    values = bradley_terry(chosen, rejected, margin_N=margin, preference_N=preference, center=0.01)
    expected = [
        -p * log_sigmoid(w - r - m) - (1 - p) * log_sigmoid(-(w - r - m)) + 0.01 * (w + r) ** 2
        for w, r, m, p in zip(*(x.tolist() for x in (chosen, rejected, margin, preference.double())), strict=True)
    ]
    assert (values.losses - torch.tensor(expected, dtype=torch.float64)).abs().max() < TOL
    assert torch.equal(values.margins, chosen - rejected)
    assert torch.equal(values.accuracies, (chosen > rejected).double())


def test_a_tie_pulls_both_scores_together() -> None:
    scores = torch.tensor([2.0, -1.0], requires_grad=True)
    bradley_terry(scores[:1], scores[1:], preference_N=torch.tensor([0.5])).losses.sum().backward()
    assert scores.grad is not None and scores.grad[0] > 0 > scores.grad[1]


def test_pcrm_holds_scores_of_similar_answers_together() -> None:
    chosen, rejected = uniform(-2, 2, N, seed=0), uniform(-2, 2, N, seed=1)
    similarity = torch.tensor([1.0, 0.5, 0.1, 0.0, 0.9], dtype=torch.float64)
    expected = [
        -log_sigmoid(w - r) - log_sigmoid(6 / (s + 1e-3) + 0.5 - (w - r))
        for w, r, s in zip(chosen.tolist(), rejected.tolist(), similarity.tolist(), strict=True)
    ]
    values = pcrm(chosen, rejected, similarity, offset=0.5)
    assert (values.losses - torch.tensor(expected, dtype=torch.float64)).abs().max() < TOL
    at_best = torch.tensor([3 / (1 + 1e-3)], dtype=torch.float64, requires_grad=True)  # half of the limit
    (slope,) = torch.autograd.grad(pcrm(at_best, torch.zeros(1), torch.ones(1)).losses.sum(), at_best)
    assert slope.abs() < TOL


def test_similarities_of_pcrm() -> None:
    assert length_ratio(torch.tensor([4, 3, 0, 0]), torch.tensor([8, 3, 5, 0])).tolist() == [0.5, 1, 0, 1]
    one = torch.tensor([[1.0, 0], [1.0, 0], [1.0, 0], [1.0, 0]])
    other = torch.tensor([[2.0, 0], [0, 1.0], [1.0, 1.0], [-1.0, 0]])
    assert (angular_similarity(one, other) - torch.tensor([1, 0.5, 0.75, 0.5])).abs().max() < 1e-8  # acos near 1


def test_haf_adds_the_policy_loss_to_the_gradients_of_both_heads() -> None:
    scores = uniform(-2, 2, 2 * N, seed=0).requires_grad_()
    pairs = example()
    reward = bradley_terry(scores[:N], scores[N:])
    policy = preference_loss(pairs, PreferenceLoss(kind="sigmoid", beta=0.1))
    values = haf(reward, policy.losses, alpha=0.2)
    assert isinstance(values, RewardValues) and torch.equal(values.margins, reward.margins)
    assert (values.losses - reward.losses - 0.2 * policy.losses).abs().max() < TOL
    values.losses.sum().backward()
    expected = [-0.02 / (1 + math.exp(margin)) for margin in policy.margins.tolist()]
    assert (pairs.chosen.grad - torch.tensor(expected, dtype=torch.float64)).abs().max() < TOL
    assert scores.grad is not None and (scores.grad != 0).all()


# ------------------------------------------------------------------------------------------------------- unpaired


def test_each_answer_has_the_unpaired_loss_of_the_formula() -> None:
    logps, ref = uniform(-9, -1, N, seed=0), uniform(-9, -1, N, seed=1)
    desirable = torch.tensor([True, False, False, True, False])
    for kind, point in (("kto", 0.4), ("apo_zero_unpaired", None), ("bco_unpaired", 0.4)):
        loss = UnpairedLoss(kind=kind, beta=0.7, desirable_weight=1.2, undesirable_weight=0.8)
        values = unpaired_loss(logps, ref, desirable, loss, reference_point=point)
        for row in range(N):
            r, sign = (logps - ref)[row].item(), 1 if desirable[row] else -1
            x = {"kto": 0.7 * (r - 0.4), "apo_zero_unpaired": 0.7 * r, "bco_unpaired": 0.7 * r - 0.4}[kind] * sign
            expected = -log_sigmoid(x) if kind == "bco_unpaired" else 1 - math.exp(log_sigmoid(x))
            assert abs(values.losses[row].item() - expected * (1.2 if sign > 0 else 0.8)) < TOL
            assert abs(values.rewards[row].item() - 0.7 * r) < TOL
