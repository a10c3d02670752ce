"""Estimates of KL(pi || pi_ref) from the tokens that were written, and the coefficient that follows them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from meshkit.algos.policy._ratios import exp
from meshkit.errors import PlanError

ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


@dataclass(frozen=True, kw_only=True)
class KL:
    """How far the policy is kept near a reference.

    estimator: see `kl_estimates`. coefficient: beta; 0 needs no reference.
    place: "loss" adds beta KL to the loss of each token; "reward" takes it from the reward of each token, as a constant of
    the policy that wrote (`token_rewards`; PPO of Ziegler et al. 2019, RLOO, REINFORCE++).
    weighted: in a loss, times the ratio of the token with its gradient, which makes the estimate right when the tokens were
    written by an older policy (DeepSeek-V3.2 2025; TRL's use_bias_correction_kl).
    Raises: PlanError for an estimator that is not known, a negative coefficient, and what has no use.
    """

    estimator: str = "k3"
    coefficient: float = 0.0
    place: Literal["loss", "reward"] = "loss"
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            near = difflib.get_close_matches(self.estimator, ESTIMATORS, n=1, cutoff=0.4)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise PlanError(
                f"KL: estimator={self.estimator!r} is not known. {hint}Choose from {', '.join(ESTIMATORS)}."
            )
        if self.place not in ("loss", "reward"):
            raise PlanError(f"KL: place={self.place!r} is not known. Choose loss or reward.")
        if self.coefficient < 0:
            raise PlanError(f"KL: coefficient={self.coefficient} drives the policy away. Use at least 0.")
        if self.place == "reward" and (self.weighted or self.estimator.endswith("+")):
            raise PlanError(
                f"KL: place='reward' passes no gradient, so estimator={self.estimator!r} and weighted={self.weighted} have "
                "no use. Give k1, k2 or k3."
            )

    @property
    def in_loss(self) -> bool:
        return self.coefficient > 0 and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        return self.coefficient > 0 and self.place == "reward"


def kl_estimates(log_probs: Tensor, reference_log_probs: Tensor, estimator: str) -> Tensor:
    """One estimate for each token; [...] fp64, with the gradient in log_probs. With D = log pi - log pi_ref:

    | estimator | value                 | expected gradient, tokens written by the policy itself           |
    |-----------|-----------------------|------------------------------------------------------------------|
    | k1        | D                     | none: E[grad log pi] = 0                                         |
    | k2        | D^2 / 2, biased       | that of KL(pi || pi_ref)                                         |
    | k3        | e^-D + D - 1, >= 0    | that of KL(pi_ref || pi), the other direction                    |
    | k1+, k3+  | that of k1, k3        | that of k2: value and gradient are both right                    |

    Beyond |D| = 20, e^-D is constant.
    Source: Schulman 2020, "Approximating KL divergence"; the + are verl's.
    """
    if estimator.endswith("+"):
        k2 = kl_estimates(log_probs, reference_log_probs, "k2")
        return k2 - k2.detach() + kl_estimates(log_probs, reference_log_probs, estimator[:-1]).detach()
    difference = log_probs.double() - reference_log_probs.detach().double()
    if estimator == "k1":
        return difference
    return difference.square() / 2 if estimator == "k2" else exp(-difference) + difference - 1


@dataclass
class AdaptiveKL:
    """A coefficient that follows a target: beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) answers / horizon).

    Use it as `replace(loss.kl, coefficient=controller.coefficient)` for the next step.
    Source: Ziegler et al. 2019 (1909.08593), section 2.2; target = 6 nats an answer and horizon = 10000 answers are theirs.
    Raises: PlanError for a target or horizon that is not positive.
    """

    coefficient: float
    target: float = 6.0
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise PlanError(f"AdaptiveKL: target={self.target} and horizon={self.horizon} divide. Use more than 0.")

    def update(self, kl: float, answers: int) -> float:
        """After a step of so many answers with this KL (mean sum over an answer's tokens); returns the new coefficient."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * answers / self.horizon
        return self.coefficient

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]
