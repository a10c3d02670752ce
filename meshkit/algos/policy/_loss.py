"""Policy loss (PPO, GRPO), token-level or sequence-level: advantage, ratio, clip, aggregation, KL, corrections, entropy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from meshkit.algos.policy._advantages import GroupAdvantage
from meshkit.algos.policy._clips import Bound, Clip, Reinforce, Surrogate, Vespo, geometric_clip, surrogate
from meshkit.algos.policy._corrections import AnyCorrection, correction_weights
from meshkit.algos.policy._returns import GAE, RewardToGo
from meshkit.algos.policy._segments import SegmentIndex, refuse_other_shapes
from meshkit.algos.policy._terms import KL, RATIOS, Ratio, exp, kl_estimates, log_ratios
from meshkit.errors import DataError, PlanError

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant")


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A policy objective: one choice on each axis. Any combination is allowed, except those that are refused.

    advantage: how the advantage of a token is computed. `step_advantages` reads it; the loss takes the result.
    ratio: see `log_ratios`. clip: what bounds the update.
    aggregation, over all answers and ranks of the step. Token-level: "token_mean" is the mean over tokens (DAPO).
    Sequence-level: "sequence_mean" is the mean over answers of their means over tokens (GRPO); "sequence_sum" the mean over
    answers of their sums (LUSPO); "constant" is "sequence_sum" divided by `max_tokens` (Dr. GRPO).
    Answers without a learnt token are not counted. KL and entropy are aggregated like the rest.
    kl: `step_advantages` applies the one of place "reward", the loss the one of place "loss".
    corrections: constant factors, multiplied, of the policy term; KL and entropy have none.
    entropy: coefficient of the entropy bonus.
    Raises: PlanError for choices that are not known or do not go together.
    """

    advantage: GroupAdvantage | GAE | RewardToGo = field(default_factory=GroupAdvantage)
    ratio: Ratio = "token"
    clip: Bound = field(default_factory=Clip)
    aggregation: Aggregation = "token_mean"
    max_tokens: int | None = None
    kl: KL = field(default_factory=KL)
    corrections: tuple[AnyCorrection, ...] = ()
    entropy: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in (("ratio", RATIOS), ("aggregation", AGGREGATIONS)):
            if getattr(self, name) not in allowed:
                raise PlanError(
                    f"PolicyLoss: {name}={getattr(self, name)!r} is not known. Choose from {', '.join(allowed)}."
                )
        kind = type(self.clip).__name__
        if self.ratio == "geometric" and (not isinstance(self.clip, Clip) or self.clip.dual is not None):
            raise PlanError(
                f"PolicyLoss: ratio='geometric' clips log-ratios before their mean, which {self.clip} does not say. Use "
                "Clip(low=0.4, high=0.4)."
            )
        if isinstance(self.clip, Vespo) and self.ratio != "trajectory":
            raise PlanError(f"PolicyLoss: Vespo weighs whole answers. Use ratio='trajectory', not {self.ratio!r}.")
        if isinstance(self.clip, Reinforce) and (self.ratio != "token" or self.kl.weighted):
            raise PlanError(f"PolicyLoss: {kind} has no ratio, so ratio={self.ratio!r} and kl.weighted have no use.")
        if (self.max_tokens is None) == (self.aggregation == "constant"):
            raise PlanError(
                f"PolicyLoss: aggregation={self.aggregation!r} with max_tokens={self.max_tokens}. Give max_tokens, the most "
                "an answer may have, with 'constant', and only there."
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise PlanError(f"PolicyLoss: max_tokens={self.max_tokens} divides. Use at least 1.")
        if self.entropy < 0:
            raise PlanError(f"PolicyLoss: entropy={self.entropy} is a bonus. Use at least 0.")

    def for_answers(self, max_new_tokens: int) -> PolicyLoss:
        """The same for answers of at most so many tokens, which the aggregation "constant" divides by."""
        return self if self.max_tokens is None else replace(self, max_tokens=max_new_tokens)

    @property
    def counts_tokens(self) -> bool:
        """Whether the sum of `PolicyValues.losses` is to be divided by the tokens of the step, or by its answers."""
        return self.aggregation == "token_mean"


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyValues:
    """Numbers of each token, [...] fp64, 0 where masked.

    losses: with the gradient. The objective is their sum divided by the tokens or the answers of the step
    (`PolicyLoss.counts_tokens`). The rest has no gradient. shares: the weight of a token in the sum. policy, kl: the terms of
    the loss before that weight (kl without its coefficient, 0 without a reference model). ratios. corrections: the product
    of the constant factors. clipped_low, clipped_high: [...] bool.
    """

    losses: Tensor
    shares: Tensor
    policy: Tensor
    kl: Tensor
    ratios: Tensor
    corrections: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def policy_loss(
    loss: PolicyLoss,
    answers: SegmentIndex,
    log_probs: Tensor,
    advantages: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
    weights: Tensor | None = None,
) -> PolicyValues:
    """The loss of each token. All tensors are [...], one number for each token of `answers`; what is masked may be anything.

    log_probs: log pi(y_t), with the gradient. old: of the snapshot; default: log_probs themselves, a step on policy, where
    the ratio is 1 and has a gradient. rollout: of the policy that wrote, as its engine computed them, for `corrections`.
    To use them as the old ones ("bypass"), give them as old and leave corrections away. reference: of the reference model,
    for `kl` of place "loss". entropy: of each prediction, with the gradient. weights: constant factors of the policy term.
    Wire: with an axis, what `SegmentIndex.sums` sends, once for each sum or mean over whole answers.
    Raises: DataError for other shapes, and for a missing input that the loss needs.
    """
    inputs = [
        ("log_probs", log_probs),
        ("advantages", advantages),
        ("old_log_probs", old_log_probs),
        ("rollout_log_probs", rollout_log_probs),
        ("reference_log_probs", reference_log_probs),
        ("entropy", entropy),
        ("weights", weights),
    ]
    refuse_other_shapes("policy_loss", answers, inputs)
    _refuse_missing(loss, reference_log_probs, entropy)
    # fp64, and 0 where masked: values of prompts and padding may be NaN, of which not even 0 times would be safe.
    # Advantages are constants of the step, also where a critic made them.
    log_probs, advantages = answers.only(log_probs), answers.only(advantages.detach())
    # On policy old is log_probs itself, detached: the ratio is 1, and its gradient is that of log pi.
    old = log_probs.detach() if old_log_probs is None else answers.only(old_log_probs.detach())
    log_ratio = log_ratios(log_probs - old, answers, loss.ratio)
    bounded = _bounded(loss, answers, log_ratio, log_probs, advantages)

    # A constant: no gradient may flow through the importance weights of tokens that are already written.
    factor = answers.mask.double() if weights is None else answers.only(weights.detach())
    for correction in loss.corrections:
        factor = factor * correction_weights(
            correction,
            answers,
            log_probs=log_probs,
            old_log_probs=old,
            rollout_log_probs=rollout_log_probs,
            advantages=advantages,
        )
    policy = answers.only(bounded.losses * factor)
    kl = _kl_term(loss.kl, answers, log_probs, reference_log_probs, log_ratio)
    # KL and entropy are outside of the factors: tokens that a correction leaves out still stay near the reference model.
    total = policy + loss.kl.coefficient * kl if loss.kl.in_loss else policy
    if loss.entropy and entropy is not None:
        total = total - loss.entropy * answers.only(entropy)
    shares = _shares(loss, answers)
    return PolicyValues(
        losses=total * shares,
        shares=shares,
        policy=policy.detach(),
        kl=kl.detach(),
        ratios=answers.only(exp(log_ratio.detach())),
        corrections=answers.only(factor),
        clipped_low=bounded.low & answers.mask,
        clipped_high=bounded.high & answers.mask,
    )


def _refuse_missing(loss: PolicyLoss, reference_log_probs: Tensor | None, entropy: Tensor | None) -> None:
    if loss.kl.in_loss and reference_log_probs is None:
        raise DataError(
            f"policy_loss: {loss.kl} compares with a reference. Give reference_log_probs, or coefficient=0."
        )
    if loss.entropy and entropy is None:
        raise DataError(f"policy_loss: entropy={loss.entropy} needs the entropy of each prediction. Give entropy.")


def _kl_term(
    kl: KL, answers: SegmentIndex, log_probs: Tensor, reference_log_probs: Tensor | None, log_ratio: Tensor
) -> Tensor:
    """The KL estimate of each token, without its coefficient; 0 without a reference model."""
    if reference_log_probs is None:
        return torch.zeros_like(log_probs)
    # Also without a coefficient in the loss: `policy_metrics` shows how far the policy is from its reference model.
    estimates = kl_estimates(log_probs, answers.only(reference_log_probs), kl.estimator)
    if kl.weighted:
        estimates = estimates * exp(log_ratio)
    return answers.only(estimates)


def _bounded(
    loss: PolicyLoss, answers: SegmentIndex, log_ratio: Tensor, log_probs: Tensor, advantages: Tensor
) -> Surrogate:
    if loss.ratio != "geometric":
        return surrogate(loss.clip, log_ratio, log_probs, advantages)
    assert isinstance(loss.clip, Clip)
    # GMPO clips each log-ratio first and takes their mean over the answer then: one outlier moves the mean little.
    clipped, low, high = geometric_clip(loss.clip, log_ratio, advantages)
    return Surrogate(-advantages * exp(answers.spread(answers.means(clipped))), low, high)


def _shares(loss: PolicyLoss, answers: SegmentIndex) -> Tensor:
    # [Note: divided once, by the whole step]
    # A loss function returns a sum, and `Run.forward_backward` divides it by the count of the step, over all ranks and
    # microbatches. A mean inside of a microbatch would weigh a token by how many others happen to be in its microbatch, and
    # another mesh would train another objective. So these are only the parts of a weight that an answer decides by itself.
    mask = answers.mask.double()
    if loss.aggregation == "sequence_mean":
        return mask / answers.spread(answers.lengths.clamp(min=1))
    return mask / loss.max_tokens if loss.max_tokens is not None else mask
