"""Choices of a policy loss against closed forms, expected gradients by enumeration, and what they refuse."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from meshkit.algos.policy import (
    ESTIMATORS,
    GMPO,
    GRPO,
    KL,
    PRESETS,
    REINFORCE,
    AdaptiveKL,
    Cispo,
    Clip,
    Correction,
    DivergenceMask,
    GroupAdvantage,
    OffPolicyMask,
    PolicyLoss,
    Reinforce,
    SegmentIndex,
    Vespo,
    gae,
    group_advantages,
    high_entropy,
    keep_informative,
    kl_estimates,
    log_ratios,
    overlong_penalty,
    policy_loss,
    select_above,
    select_best,
    token_rewards,
    whiten,
)
from meshkit.errors import DataError, PlanError

TOL = 1e-12  # only the order of fp64 operations differs


def fp64(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------------- KL


def enumerated(estimator: str) -> tuple[float, Tensor, Tensor]:
    """(E[estimate], E[its gradient], logits) over all words, with words drawn from the policy itself."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    estimates = kl_estimates(log_probs, reference, estimator)
    drawn = log_probs.detach().exp()
    (gradient,) = torch.autograd.grad((drawn * estimates).sum(), logits)
    return float((drawn * estimates.detach()).sum()), gradient, logits


def exact(logits: Tensor, *, forward: bool) -> tuple[float, Tensor]:
    """KL(pi || pi_ref), or with `forward` KL(pi_ref || pi), and its gradient."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    torch.randn(7, generator=generator, dtype=torch.float64)
    reference = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    one, other = (reference, log_probs) if forward else (log_probs, reference)
    kl = (one.exp() * (one - other)).sum()
    return kl.item(), torch.autograd.grad(kl, logits)[0]


@pytest.mark.parametrize("estimator", ["k1", "k3", "k1+", "k3+"])
def test_estimates_of_kl_are_right_on_average(estimator: str) -> None:
    value, _, logits = enumerated(estimator)
    assert abs(value - exact(logits, forward=False)[0]) < TOL


def test_the_expected_gradient_of_k1_is_nothing() -> None:
    assert enumerated("k1")[1].abs().max() < TOL


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_the_expected_gradient_of_k2_is_that_of_kl(estimator: str) -> None:
    _, gradient, logits = enumerated(estimator)
    assert (gradient - exact(logits, forward=False)[1]).abs().max() < TOL


def test_the_expected_gradient_of_k3_is_that_of_the_other_direction() -> None:
    _, gradient, logits = enumerated("k3")
    assert (gradient - exact(logits, forward=True)[1]).abs().max() < TOL


def test_a_weighted_k3_has_the_gradient_of_kl_whoever_wrote() -> None:
    """DeepSeek-V3.2: E_old[rho k3] is E_pi[k3] = KL, for any old policy."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    old, reference = (torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    loss = PolicyLoss(kl=KL(estimator="k3", coefficient=1.0, weighted=True))
    answers = SegmentIndex.of_rows(torch.ones(7, 1))
    log_probs = logits.log_softmax(0)
    values = policy_loss(
        loss,
        answers,
        log_probs[:, None],
        torch.zeros(7, 1),
        old_log_probs=old[:, None],
        reference_log_probs=reference[:, None],
    )
    (found,) = torch.autograd.grad((old.exp()[:, None] * values.losses).sum(), logits, retain_graph=True)
    kl = (log_probs.exp() * (log_probs - reference)).sum()
    assert (found - torch.autograd.grad(kl, logits)[0]).abs().max() < TOL


def test_kl_in_the_reward_is_taken_from_learnt_tokens() -> None:
    learn = torch.tensor([[False, True, True, False]])
    found = token_rewards(
        fp64([0, 0, 0, 2.0]),
        learn,
        kl=KL(estimator="k1", coefficient=0.5, place="reward"),
        old_log_probs_BT=fp64([-9, -1, -2, -9]),
        reference_log_probs_BT=fp64([-1, -1.5, -1, -1]),
    )
    assert torch.equal(found, fp64([0, -0.25, 0.5, 2]))


def test_a_controller_follows_its_target_and_goes_on_from_its_state() -> None:
    controller = AdaptiveKL(0.1, target=6.0, horizon=100.0)
    assert abs(controller.update(6.6, 10) - 0.1 * 1.01) < TOL  # 10 % above, for a tenth of the horizon
    assert abs(controller.update(600.0, 10) - 0.1 * 1.01 * 1.02) < TOL  # at most 20 %
    again = AdaptiveKL(0.5, target=6.0, horizon=100.0)
    again.load_state_dict(controller.state_dict())
    assert again.update(0.0, 10) == controller.update(0.0, 10) < 0.1011


# --------------------------------------------------------------------------------------------- ratios and bounds


def example() -> tuple[SegmentIndex, Tensor, Tensor, Tensor]:
    """Two answers of 3 and 1 tokens in one row, with the other's tokens between."""
    answers = SegmentIndex(mask=torch.tensor([[1, 1, 0, 1, 1]]).bool(), index=torch.tensor([[0, 1, 0, 0, 0]]), count=2)
    log_probs = fp64([-1.0, -2.0, math.nan, -0.5, -3.0]).requires_grad_()
    return answers, log_probs, fp64([-1.2, -1.0, math.nan, -0.5, -2.0]), fp64([2.0, -1.0, math.nan, 2.0, 2.0])


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        ("token", [0.2, -1.0, 0, 0, -1.0]),
        ("sequence", [-0.8 / 3, -1.0, -0.8 / 3, -0.8 / 3, -0.8 / 3]),
        ("sequence_token", [-0.8 / 3, -1.0, -0.8 / 3, -0.8 / 3, -0.8 / 3]),
        ("trajectory", [-0.8, -1.0, -0.8, -0.8, -0.8]),
        ("geometric", [0.2, -1.0, 0, 0, -1.0]),
    ],
)
def test_ratios_of_tokens_and_answers(ratio: Any, expected: list[float]) -> None:
    answers, log_probs, old, _ = example()
    found = log_ratios(log_probs - old, answers, ratio)
    assert (found - fp64(expected))[answers.mask].abs().max() < TOL


def test_the_ratio_of_a_sequence_has_its_gradient_in_every_token() -> None:
    answers, log_probs, old, _ = example()
    chosen = log_ratios(log_probs - old, answers, "sequence")[0, 0]
    (found,) = torch.autograd.grad(chosen, log_probs)
    assert (found - fp64([1 / 3, 0, 0, 1 / 3, 1 / 3])).abs().max() < TOL
    chosen = log_ratios(log_probs - old, answers, "sequence_token")[0, 0]
    assert torch.equal(torch.autograd.grad(chosen, log_probs)[0], fp64([1, 0, 0, 0, 0]))


def test_reinforce_has_the_gradient_of_the_policy_gradient_theorem() -> None:
    answers, log_probs, _, advantages = example()
    values = policy_loss(REINFORCE, answers, log_probs, advantages)
    values.losses.sum().backward()
    assert torch.equal(log_probs.grad, fp64([-2, 1, 0, -2, -2]))


def test_on_policy_every_bound_has_the_gradient_of_reinforce() -> None:
    """The ratio is 1, where Clip, Cispo, Sapo and GMPO agree to first order."""
    for clip, ratio in [(Clip(), "token"), (Cispo(), "token"), (PRESETS["SAPO"].clip, "token"), (Clip(), "trajectory")]:
        answers, log_probs, _, _ = example()
        advantages = fp64([2.0, -1.0, 0.0, 2.0, 2.0])
        loss = PolicyLoss(clip=clip, ratio=ratio, aggregation="sequence_mean")  # type: ignore[arg-type]
        policy_loss(loss, answers, log_probs, advantages).losses.sum().backward()
        # A trajectory's ratio stands at each of its tokens, and their mean is taken.
        share = fp64([1 / 3, 1, 0, 1 / 3, 1 / 3]) if ratio == "token" else fp64([1, 1, 0, 1, 1])
        assert (log_probs.grad + advantages * share).abs().max() < TOL, clip


def test_dual_clip_bounds_the_loss_of_a_bad_answer() -> None:
    answers = SegmentIndex.of_rows(torch.ones(1, 3))
    log_probs = fp64([math.log(5), math.log(2), math.log(0.5)]).requires_grad_()
    loss = PolicyLoss(clip=Clip(low=0.2, high=0.2, dual=3.0))
    values = policy_loss(loss, answers, log_probs, fp64([-1.0, -1, -1]), old_log_probs=torch.zeros(1, 3))
    values.losses.sum().backward()
    assert (values.losses - fp64([3, 2, 0.8])).abs().max() < TOL
    assert (log_probs.grad - fp64([0, 2, 0])).abs().max() < TOL
    assert values.clipped_low.tolist() == [[False, False, True]] and not values.clipped_high.any()


def test_aggregations_of_two_answers() -> None:
    answers, log_probs, _, advantages = example()
    # With the ratio 1 each token's loss is -A: -2, -2, -2 in one answer and 1 in the other.
    expected = {"token_mean": -5.0, "sequence_sum": -5.0, "constant": -0.5, "sequence_mean": -1.0}
    for aggregation, total in expected.items():
        loss = PolicyLoss(aggregation=aggregation, max_tokens=10 if aggregation == "constant" else None)  # type: ignore[arg-type]
        assert abs(policy_loss(loss, answers, log_probs, advantages).losses.sum().item() - total) < TOL


# ----------------------------------------------------------------------------------------------------- corrections


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction(level="token", kind="truncate", low=0.0, high=1.5), [1.5, 0.25, 1.0, 1.0]),
        (Correction(level="token", kind="mask", low=0.5, high=1.5), [0.0, 0.0, 1.0, 1.0]),
        (Correction(level="sequence", kind="truncate", high=3.0), [2.0, 0.25, 2.0, 2.0]),
        (Correction(level="sequence", kind="mask", low=0.5, high=3.0), [2.0, 0.0, 2.0, 2.0]),
        (Correction(level="geometric", kind="reject", low=0.9, high=1.3), [1.0, 0.0, 1.0, 1.0]),
        (Correction(level="geometric", kind="truncate", high=9.0), [2 ** (1 / 3), 0.25, 2 ** (1 / 3), 2 ** (1 / 3)]),
        (OffPolicyMask(threshold=0.1), [1.0, 0.0, 1.0, 1.0]),
    ],
)
def test_corrections_weigh_tokens(correction: Correction | OffPolicyMask, expected: list[float]) -> None:
    """pi_old / pi_rollout is 2, 1, 1 in the first answer and 1/4 in the second, whose advantage is negative."""
    answers, log_probs, old, advantages = example()
    rollout = old - fp64([math.log(2), math.log(0.25), math.nan, 0, 0])
    loss = PolicyLoss(clip=Reinforce(), corrections=(correction,))
    values = policy_loss(loss, answers, log_probs, advantages, old_log_probs=old, rollout_log_probs=rollout)
    assert (values.corrections[answers.mask] - fp64(*expected)).abs().max() < TOL
    assert (values.policy + values.corrections * (advantages * log_probs.detach()).nan_to_num()).abs().max() < TOL


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_a_divergence_mask_drops_tokens_that_have_gone_too_far_the_way_that_they_are_rewarded(
    divergence: Literal["tv", "kl"],
) -> None:
    """Against torch's own distances of the two-outcome distributions; A > 0 in the first answer, A < 0 in the second."""
    answers, _, _, advantages = example()
    then, now = fp64([0.5, 0.9, 0.3, 0.6, 1e-4]), fp64([0.8, 0.7, 0.31, 0.2, 1.2e-3])
    pairs = [torch.distributions.Bernoulli(probs=p) for p in (then, now)]
    distance = (now - then).abs() if divergence == "tv" else torch.distributions.kl_divergence(*pairs)
    gone = torch.where(advantages > 0, now > then, now < then)
    for limit in (0.05, 0.15):
        mask = DivergenceMask(divergence=divergence, limit=limit)
        loss = PolicyLoss(clip=Reinforce(), corrections=(mask,))
        values = policy_loss(loss, answers, now.log(), advantages, rollout_log_probs=then.log())
        expected = answers.mask & ~(gone & (distance > limit))
        assert torch.equal(values.corrections > 0, expected)
        assert (answers.mask & ~expected).any() and (expected & (distance > limit)).any()
        certain = torch.zeros_like(now)  # log-probabilities of 0: nothing else can be
        assert policy_loss(loss, answers, certain, advantages, rollout_log_probs=certain).losses.isfinite().all()


def test_dppo_is_importance_sampling_from_the_writer_within_the_divergence() -> None:
    answers, log_probs, old, advantages = example()
    rollout = old - 0.2
    values = policy_loss(
        PRESETS["DPPO_TV"], answers, log_probs, advantages, old_log_probs=old, rollout_log_probs=rollout
    )
    kept = values.corrections > 0
    expected = -(log_probs.detach() - rollout).exp() * advantages
    assert bool(kept.any()) and (values.policy - expected)[kept].abs().max() < TOL


def test_an_old_policy_that_wrote_itself_needs_no_correction() -> None:
    """Bypass: with pi_old = pi_rollout every weight is 1."""
    answers, log_probs, old, advantages = example()
    for level in ("token", "sequence", "geometric"):
        loss = PolicyLoss(corrections=(Correction(level=level),))  # type: ignore[arg-type]
        values = policy_loss(loss, answers, log_probs, advantages, old_log_probs=old, rollout_log_probs=old)
        plain = policy_loss(PolicyLoss(), answers, log_probs, advantages, old_log_probs=old)
        assert torch.equal(values.losses, plain.losses)


def test_the_share_of_tokens_with_the_highest_entropy() -> None:
    entropy = torch.rand(1001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert (entropy >= high_entropy(entropy, 0.2)).sum() == 201
    assert abs(high_entropy(entropy, 0.3) - torch.quantile(entropy, 0.7).item()) < TOL
    assert high_entropy(entropy[:0], 0.5) == math.inf


# ------------------------------------------------------------------------------------------------------ advantages


def test_an_answer_without_a_score_changes_nobody_elses_advantage() -> None:
    for baseline in ("group", "leave_one_out", "length_weighted"):
        for scale in ("none", "group", "batch"):
            advantage = GroupAdvantage(baseline=baseline, scale=scale)  # type: ignore[arg-type]
            lengths = torch.tensor([3, 1, 7, 2, 4])
            found = group_advantages(
                fp64(1, math.nan, 3, 0, 5), torch.tensor([0, 0, 0, 1, 1]), advantage, lengths_A=lengths
            )
            kept = torch.tensor([0, 2, 3, 4])
            without = group_advantages(fp64(1, 3, 0, 5), torch.tensor([0, 0, 1, 1]), advantage, lengths_A=lengths[kept])
            assert found.advantages[1] == 0 and found.scored.tolist() == [True, False, True, True, True]
            assert (found.advantages[kept] - without.advantages).abs().max() < TOL


def test_a_single_answer_and_equal_answers() -> None:
    rewards, groups = fp64(0.7, 0.1, 0.1, 0.1), torch.tensor([9, 4, 4, 4])
    for scale in ("none", "group", "batch"):
        found = group_advantages(rewards, groups, GroupAdvantage(scale=scale))  # type: ignore[arg-type]
        assert found.advantages.abs().max() == 0 and found.uniform.all()
    found = group_advantages(rewards, groups, GroupAdvantage(baseline="leave_one_out"))
    assert found.advantages.tolist() == [0.7, 0, 0, 0]  # nobody else to compare with


def test_population_and_sample_deviation() -> None:
    rewards, groups = fp64(0, 2), torch.tensor([0, 0])
    for unbiased, deviation in ((True, math.sqrt(2)), (False, 1.0)):
        advantage = GroupAdvantage(scale="group", unbiased=unbiased, epsilon=0.0)
        assert abs(group_advantages(rewards, groups, advantage).advantages[1].item() - 1 / deviation) < TOL


def test_gae_goes_on_where_an_answer_was_cut_off() -> None:
    """Two answers in a row: prompt of one token, two learnt tokens, the last token; the score stands there."""
    segments = torch.tensor([[1, 1, 1, 2, 2, 2, 0]])
    learn = torch.tensor([[1, 1, 0, 1, 1, 0, 0]]).bool()
    values, rewards = fp64([0.5, 0.25, 0.125, 1.0, 2.0, 4.0, 9.0]), fp64([0, 0, 1.0, 0, 0, 0, 7.0])
    opened = torch.tensor([[0, 0, 0, 0, 0, 1, 0]]).bool()
    found = gae(rewards, values, learn, segments, discount=0.5, decay=0.5, open_BT=opened)
    last, cut = 1.0 - 0.25, 0.5 * 4.0 - 2.0
    first, start = 0.5 * 0.25 - 0.5 + 0.25 * last, 0.5 * 2.0 - 1.0 + 0.25 * cut
    assert (found.advantages - fp64([first, last, 0, start, cut, 0, 0])).abs().max() < TOL
    assert (found.returns - (found.advantages + values) * learn).abs().max() < TOL


def test_whitened_numbers_have_mean_0_and_variance_1() -> None:
    values, mask = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).double(), torch.ones(4, 5).bool()
    mask[1] = False
    white = whiten(values + 100, mask)
    assert white[1].abs().max() == 0 and abs(white[mask].mean()) < 1e-12 and abs(white[mask].std() - 1) < 1e-7


# -------------------------------------------------------------------------------------------------------- sampling


def test_dynamic_sampling_says_how_many_groups_are_missing() -> None:
    rewards, groups = fp64(1, 1, 0, 1, 2, 0, math.nan, 5), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    kept = keep_informative(rewards, groups, wanted=3)
    assert kept.mask.tolist() == [False, False, True, True, True, True, False, False]
    assert (kept.groups, kept.missing) == (2, 1)
    kept = keep_informative(rewards, groups, wanted=1)
    assert kept.mask.tolist() == [False, False, True, True] + [False] * 4 and kept.missing == 0


def test_the_penalty_of_long_answers() -> None:
    found = overlong_penalty(torch.tensor([1, 80, 90, 100, 200]), limit=100, buffer=20)
    assert (found - fp64(0, 0, -0.5, -1, -1)).abs().max() < TOL


def test_rejection_sampling_selects() -> None:
    rewards, groups = fp64(1, 3, 3, math.nan, 0), torch.tensor([0, 0, 0, 1, 1])
    assert select_best(rewards, groups).tolist() == [False, True, False, False, True]
    assert select_best(rewards, groups, best=2).tolist() == [False, True, True, False, True]
    assert select_above(rewards, 1.0).tolist() == [True, True, True, False, False]


# -------------------------------------------------------------------------------------------------------- refusals


def test_every_preset_can_be_computed() -> None:
    for name, loss in PRESETS.items():
        answers, log_probs, old, advantages = example()
        values = policy_loss(
            loss, answers, log_probs, advantages, old_log_probs=old, rollout_log_probs=old, reference_log_probs=old
        )
        values.losses.sum().backward()
        assert log_probs.grad is not None and log_probs.grad.isfinite().all(), name
    assert len(PRESETS) == 21 and GRPO is PRESETS["GRPO"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PolicyLoss(ratio="answer"), "ratio='answer' is not known. Choose from token, sequence"),
        (lambda: PolicyLoss(ratio="geometric", clip=Cispo()), "ratio='geometric' clips log-ratios before their mean"),
        (lambda: PolicyLoss(clip=Vespo()), "Vespo weighs whole answers. Use ratio='trajectory', not 'token'"),
        (lambda: PolicyLoss(clip=Reinforce(), ratio="sequence"), "Reinforce has no ratio, so ratio='sequence'"),
        (lambda: PolicyLoss(aggregation="constant"), "aggregation='constant' with max_tokens=None. Give max_tokens"),
        (lambda: PolicyLoss(max_tokens=5), "aggregation='token_mean' with max_tokens=5"),
        (lambda: PolicyLoss(entropy=-0.1), "entropy=-0.1 is a bonus"),
        (lambda: Clip(low=0.2, high=0.2, dual=1.1), "dual=1.1 is inside of 1 \\+ high=1.2"),
        (lambda: KL(estimator="k4"), "estimator='k4' is not known. Did you mean 'k"),
        (
            lambda: kl_estimates(torch.zeros(1), torch.zeros(1), "abs"),
            "kl_estimates: estimator='abs' is not known. Choose",
        ),
        (lambda: kl_estimates(torch.zeros(1), torch.zeros(1), "low_var_kl"), "Did you mean 'k3'"),
        (lambda: kl_estimates(torch.zeros(1), torch.zeros(1), "k2+"), "Did you mean 'k2'"),
        (lambda: KL(estimator="k3+", place="reward"), "place='reward' passes no gradient"),
        (lambda: DivergenceMask(divergence="js"), "divergence='js' is not known. Choose from tv, kl"),  # type: ignore[arg-type]
        (lambda: DivergenceMask(limit=0), "limit=0 is how far a token may go"),
        (lambda: Correction(level="word"), "level='word' is not known. Choose from token, sequence, geometric"),
        (lambda: GroupAdvantage(baseline="mean"), "baseline='mean' is not known. Choose from none, group"),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def test_what_a_loss_needs_is_said() -> None:
    answers, log_probs, _, advantages = example()
    with pytest.raises(DataError, match="compares with a reference. Give reference_log_probs, or coefficient=0"):
        policy_loss(GRPO, answers, log_probs, advantages)
    with pytest.raises(DataError, match="compares with the policy that wrote the tokens. Give rollout_log_probs"):
        policy_loss(PolicyLoss(corrections=(Correction(),)), answers, log_probs, advantages)
    with pytest.raises(DataError, match="advantages \\(2,\\), but there are \\(1, 5\\) tokens"):
        policy_loss(GMPO, answers, log_probs, fp64(1, 2))
    with pytest.raises(DataError, match="reward 1 is inf. NaN marks an answer without a score"):
        group_advantages(fp64(1, math.inf), torch.tensor([0, 0]), GroupAdvantage())
    with pytest.raises(DataError, match="baseline='greedy' needs greedy_A"):
        group_advantages(fp64(1, 2), torch.tensor([0, 0]), GroupAdvantage(baseline="greedy"))
    assert set(ESTIMATORS) == {"k1", "k2", "k3", "k1+", "k3+"}
