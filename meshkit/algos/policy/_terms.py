"""Terms of a policy update, one number for each token: importance ratios, estimates of the KL divergence, the value loss.

Importance ratio: log rho_t = log pi(y_t) - log pi_old(y_t), how much likelier the policy makes a token than the policy that
wrote it. KL: of the policy from a reference model, and the coefficient that follows it. Value loss: what a critic minimises.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from meshkit.algos.policy._segments import SegmentIndex, refuse_other_shapes
from meshkit.errors import PlanError

Ratio = Literal["token", "sequence", "sequence_token", "trajectory", "geometric"]
RATIOS: tuple[Ratio, ...] = ("token", "sequence", "sequence_token", "trajectory", "geometric")

LIMIT = 20.0  # e^20 is half a billion: beyond it a ratio is constant and passes no gradient, as in verl
ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")
OTHER_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+"}  # verl's


def exp(log: Tensor) -> Tensor:
    """e^x, constant for |x| > 20."""
    return log.clamp(-LIMIT, LIMIT).exp()


def log_ratios(log_rho: Tensor, answers: SegmentIndex, ratio: Ratio) -> Tensor:
    """The logarithm of each token's ratio; [...] fp64, with the gradient.

    | ratio          | log of what stands at token t                                                          |
    |----------------|----------------------------------------------------------------------------------------|
    | token          | log rho_t (PPO, Schulman et al. 2017)                                                  |
    | sequence       | the mean of log rho over the answer (GSPO, Zheng et al. 2025, 2507.18071)              |
    | sequence_token | that as a constant, with the gradient of log pi(y_t) (GSPO-token, the same)            |
    | trajectory     | the sum of log rho over the answer: the importance weight of the whole (RLOO)          |
    | geometric      | log rho_t; the mean is taken after clipping (GMPO, Zhao et al. 2025, 2507.20673)       |
    """
    log_rho = answers.only(log_rho)
    if ratio == "sequence":
        return answers.spread(answers.means(log_rho))
    if ratio == "sequence_token":
        # sg(mean) + x - sg(x): the value is the mean, the gradient that of the token (GSPO, section 4.3).
        return answers.spread(answers.means(log_rho.detach())) + log_rho - log_rho.detach()
    if ratio == "trajectory":
        return answers.spread(answers.sums(log_rho)[0])
    return log_rho


@dataclass(frozen=True, kw_only=True)
class KL:
    """The KL penalty that keeps the policy near a reference model.

    estimator: see `kl_estimates`. coefficient: beta; 0 needs no reference model.
    place: "loss" adds beta KL to the loss of each token. "reward" subtracts it from the reward of each token, as a constant
    of the policy that wrote them (`token_rewards`; PPO of Ziegler et al. 2019, RLOO, REINFORCE++).
    weighted: in a loss, multiply by the ratio of the token, with its gradient. The estimate is then right also for tokens
    that an older policy wrote (DeepSeek-V3.2 2025; TRL's use_bias_correction_kl).
    Raises: PlanError for an unknown estimator, a negative coefficient, and choices without effect.
    """

    estimator: str = "k3"
    coefficient: float = 0.0
    place: Literal["loss", "reward"] = "loss"
    weighted: bool = False

    def __post_init__(self) -> None:
        _refuse_unknown("KL", self.estimator)
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
    """Estimate KL(pi || pi_ref) at each token; [...] fp64, with the gradient in log_probs. With D = log pi - log pi_ref:

    | estimator | value                 | expected gradient, tokens written by the policy itself           |
    |-----------|-----------------------|------------------------------------------------------------------|
    | k1        | D                     | none: E[grad log pi] = 0                                         |
    | k2        | D^2 / 2, biased       | that of KL(pi || pi_ref)                                         |
    | k3        | e^-D + D - 1, >= 0    | that of KL(pi_ref || pi), the other direction                    |
    | k1+, k3+  | that of k1, k3        | that of k2: value and gradient are both right                    |

    Beyond |D| = 20, e^-D is constant. Raises: PlanError for another name.
    Source: Schulman 2020, "Approximating KL divergence"; the + are verl's.
    """
    _refuse_unknown("kl_estimates", estimator)
    if estimator.endswith("+"):
        k2 = kl_estimates(log_probs, reference_log_probs, "k2")
        # The gradient of k2, and the value of the other estimate.
        return k2 - k2.detach() + kl_estimates(log_probs, reference_log_probs, estimator[:-1]).detach()
    # The reference is a constant, also where it is a live model.
    difference = log_probs.double() - reference_log_probs.detach().double()
    if estimator == "k1":
        return difference
    return difference.square() / 2 if estimator == "k2" else exp(-difference) + difference - 1


def _refuse_unknown(caller: str, estimator: str) -> None:
    if estimator in ESTIMATORS:
        return
    # A name of verl's is known by what it is called here; verl's |D| ("abs") is of no divergence, and has no name here.
    near = OTHER_NAMES.get(estimator) or next(
        iter(difflib.get_close_matches(estimator, ESTIMATORS, n=1, cutoff=0.4)), ""
    )
    hint = f"Did you mean {near!r}? " if near else ""
    raise PlanError(f"{caller}: estimator={estimator!r} is not known. {hint}Choose from {', '.join(ESTIMATORS)}.")


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
        """Adapt to a step with this KL (the mean over answers of the sum over tokens); returns the new coefficient."""
        # Clipped, so that one step far off does not move beta by more than a fifth of answers / horizon.
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * answers / self.horizon
        return self.coefficient

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]


class ValueLosses(NamedTuple):
    """losses: [...] fp64 with the gradient; their sum is to be divided by the tokens of the step. clipped: [...] bool."""

    losses: Tensor
    clipped: Tensor


def value_losses(
    values: Tensor,
    returns: Tensor,
    answers: SegmentIndex,
    *,
    old_values: Tensor | None = None,
    clip: float | None = 0.2,
) -> ValueLosses:
    """max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2, 0 where masked; clip=None is plain (V - R)^2 / 2.

    values: V of the state before each label, with the gradient. returns, old_values: constants. All [...].
    Without old_values nothing is clipped. Source: PPO2 of OpenAI baselines; the same in TRL and verl.
    """
    refuse_other_shapes("value_losses", answers, [("values", values), ("returns", returns), ("old_values", old_values)])
    value, target = answers.only(values), answers.only(returns.detach())
    plain = (value - target).square()
    if clip is None or old_values is None:
        return ValueLosses(plain / 2, torch.zeros_like(answers.mask))
    old = answers.only(old_values.detach())
    # Pessimistic, as the policy's clip: of the two errors the larger one counts.
    clipped = (old + (value - old).clamp(-clip, clip) - target).square()
    return ValueLosses(torch.maximum(plain, clipped) / 2, clipped > plain)
