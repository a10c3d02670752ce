"""Off-policy correction (TIS, MIS, IcePop, DPPO): constant factors for tokens that another policy wrote.

Three policies: pi_rollout wrote the tokens, with the numerics of its engine; pi_old is the trainer's snapshot of it; pi is
trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshkit.algos.policy._segments import SegmentIndex
from meshkit.algos.policy._terms import exp
from meshkit.errors import DataError, PlanError


@dataclass(frozen=True, kw_only=True)
class Correction:
    """w = pi_old / pi_rollout, bounded, times the loss of the token: decoupled PPO where the loss clips pi / pi_old.

    level: "token"; "sequence", the product over the answer; "geometric", its geometric mean, which does not grow with length.
    kind: "truncate" is w bounded to [low, high] (TIS); "mask" is w inside, 0 outside (MIS, IcePop); "reject" is 1 inside, 0
    outside. Tokens of a rejected answer still count in the mean.
    Token weights are biased, those of sequences are not but vary without bound (1.1^100 is 13,780); geometric rejection of
    [0.999, 1.001] is length-neutral.
    Source: Hilton et al. 2021 (2110.00641) for the decoupling; Yao et al. 2025 for truncation; verl's rollout correction.
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    kind: Literal["truncate", "mask", "reject"] = "truncate"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        for name, allowed in (("level", ("token", "sequence", "geometric")), ("kind", ("truncate", "mask", "reject"))):
            if getattr(self, name) not in allowed:
                raise PlanError(
                    f"Correction: {name}={getattr(self, name)!r} is not known. Choose from {', '.join(allowed)}."
                )
        if not 0 <= self.low < self.high:
            raise PlanError(f"Correction: low={self.low}, high={self.high} bound a ratio. Use 0 <= low < high.")


@dataclass(frozen=True, kw_only=True)
class OffPolicyMask:
    """Drops an answer with A < 0 whose mean of log pi_rollout - log pi is above `threshold`: pi would hardly write it.

    Without rollout log-probabilities, pi_old stands in for pi_rollout. Source: DeepSeek-V3.2 2025.
    """

    threshold: float = 0.05


@dataclass(frozen=True, kw_only=True)
class DivergenceMask:
    """Drops a token whose probability has gone further from pi_rollout's than `limit`, the way that A rewards (DPPO).

    divergence: of the two choices "this token" and "any other": "tv" is |pi - pi_rollout|, "kl" KL(pi_rollout || pi). Unlike
    a bound of their ratio it lets rare tokens change by much, and likely ones by little. A token that comes back is kept.
    Source: Divergence PPO 2026 (2602.04879), the binary forms.
    """

    divergence: Literal["tv", "kl"] = "tv"
    limit: float = 0.15

    def __post_init__(self) -> None:
        if self.divergence not in ("tv", "kl"):
            raise PlanError(f"DivergenceMask: divergence={self.divergence!r} is not known. Choose from tv, kl.")
        if not self.limit > 0:
            raise PlanError(f"DivergenceMask: limit={self.limit} is how far a token may go. Use more than 0.")


AnyCorrection = Correction | OffPolicyMask | DivergenceMask


@torch.no_grad()
def correction_weights(
    correction: AnyCorrection,
    answers: SegmentIndex,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor | None,
    advantages: Tensor,
) -> Tensor:
    """[...] fp64, a constant factor for each token.

    Raises: DataError for a `Correction` or a `DivergenceMask` without rollout log-probabilities.
    """
    if isinstance(correction, OffPolicyMask):
        # A mistake that pi itself would make teaches it; one that only an older policy made misleads it. Right answers are
        # kept, however old.
        wrote = old_log_probs if rollout_log_probs is None else rollout_log_probs
        drift = answers.spread(answers.means(answers.only(wrote) - answers.only(log_probs)))
        return ((advantages >= 0) | (drift <= correction.threshold)).double()
    if rollout_log_probs is None:
        raise DataError(
            f"{correction}: compares with the policy that wrote the tokens. Give rollout_log_probs, or leave it out."
        )
    if isinstance(correction, DivergenceMask):
        return _near(correction, answers.only(log_probs), answers.only(rollout_log_probs), advantages).double()
    # pi_old, not pi: the ratio pi / pi_old is the clip's. Together they are pi / pi_rollout, of which only this factor is a
    # constant.
    log_w = answers.only(old_log_probs) - answers.only(rollout_log_probs)
    if correction.level == "sequence":
        log_w = answers.spread(answers.sums(log_w)[0])
    elif correction.level == "geometric":
        log_w = answers.spread(answers.means(log_w))
    # Bounded to e^20 before its own bounds: the product over a long answer would be inf, and inf times a mask of 0 is NaN.
    weight = exp(log_w)
    if correction.kind == "truncate":
        return weight.clamp(correction.low, correction.high)
    inside = (weight >= correction.low) & (weight <= correction.high)
    return torch.where(inside, weight if correction.kind == "mask" else 1.0, 0.0)


def _near(mask: DivergenceMask, log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """[...] bool: the tokens that a `DivergenceMask` keeps."""
    now, then = log_probs.exp(), rollout_log_probs.exp()
    if mask.divergence == "tv":
        distance = (now - then).abs()
    else:
        # 1 - p of a token that is all but certain is 0 in fp64; its divergence is then that of 1e-16.
        other, other_then = ((1 - p).clamp(min=1e-16) for p in (now, then))
        distance = then * (rollout_log_probs - log_probs) + other_then * (other_then / other).log()
    # A token with A > 0 is made likelier, one with A < 0 less likely: only beyond the limit on that side it stops.
    gone = torch.where(advantages > 0, now > then, now < then)
    return ~(gone & (distance > mask.limit))


@torch.no_grad()
def high_entropy(entropy: Tensor, share: float) -> float:
    """The entropy threshold above which the `share` of tokens with the highest entropy lies.

    entropy: [N], of all learnt tokens of the step. Tokens below the threshold get weight 0:
    `weights = (entropy >= high_entropy(...)).double()`.
    Source: Wang et al. 2025 (2506.01939), share = 0.2.
    """
    if not 0 < share <= 1:
        raise PlanError(f"high_entropy: share={share} is the share of tokens that learn. Use (0, 1].")
    # numpy's linear quantile; torch's refuses more than 2^24 numbers.
    ordered = entropy.double().flatten().sort().values
    if not len(ordered):
        return math.inf
    position = (1 - share) * (len(ordered) - 1)
    below = ordered[math.floor(position)]
    return float(torch.lerp(below, ordered[math.ceil(position)], position - math.floor(position)))
