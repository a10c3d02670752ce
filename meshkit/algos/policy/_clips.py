"""Clipping (surrogate objective): the loss of each token from its importance ratio rho and its advantage A, bounded.

Each bound returns the losses of the tokens, [...] fp64, and the tokens whose gradient it stops, below and above.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshkit.algos.policy._terms import LIMIT, exp
from meshkit.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Clip:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A); with `dual` never more than -dual A where A < 0.

    high > low is DAPO's clip-higher. dual: Ye et al. 2020 (1912.09729), c = 3; the same number is INTELLECT-2's and TRL's
    delta, which bounds rho itself: for A < 0 both are the loss -min(rho, dual) A, and for A > 0 neither does anything.
    low = high = inf is plain importance sampling.
    Source: Schulman et al. 2017 (1707.06347), equation 7; Yu et al. 2025 (2503.14476), equation 10.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.low < 0 or self.high < 0:
            raise PlanError(f"Clip: low={self.low}, high={self.high} are distances from 1. Use at least 0.")
        if self.dual is not None and self.dual <= 1 + self.high:
            raise PlanError(f"Clip: dual={self.dual} is inside of 1 + high={1 + self.high}. Use more, such as 3.")


@dataclass(frozen=True, kw_only=True)
class Cispo:
    """-sg(clip(rho, low, high)) A log pi: the weight is bounded, and no token loses its gradient.

    low, high: bounds of the weight itself. Source: MiniMax-M1 2025 (2506.13585); high = 5 is ScaleRL's and TRL's.
    """

    low: float = 0.0
    high: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise PlanError(f"Cispo: low={self.low}, high={self.high} bound the weight. Use 0 <= low <= high.")


@dataclass(frozen=True, kw_only=True)
class Sapo:
    """-4 sigma(tau (rho - 1)) / tau A: a soft gate, tau = `positive` where A > 0, else `negative`.

    Source: Gao et al. 2025 (2511.20347).
    """

    positive: float = 1.0
    negative: float = 1.05

    def __post_init__(self) -> None:
        if min(self.positive, self.negative) <= 0:
            raise PlanError(f"Sapo: temperatures {self.positive}, {self.negative} divide. Use more than 0.")


@dataclass(frozen=True, kw_only=True)
class Vespo:
    """-sg(phi(w)) A log pi, phi(w) = w^k e^(b (1 - w)) of the whole answer's ratio w; k and b by the sign of A.

    Source: VESPO 2026 (2602.10693), as TRL 1.16 computes it; w is bounded to [1e-8, e^20].
    """

    power: tuple[float, float] = (2.0, 3.0)
    """k where A >= 0, and where A < 0"""
    rate: tuple[float, float] = (3.0, 2.0)
    """b where A >= 0, and where A < 0"""


@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """-A log pi: no ratio and no bound. Source: Williams 1992."""


Bound = Clip | Cispo | Sapo | Vespo | Reinforce


class Surrogate(NamedTuple):
    """losses: [...] fp64 with the gradient. low, high: [...] bool, where the bound holds."""

    losses: Tensor
    low: Tensor
    high: Tensor


def surrogate(bound: Bound, log_ratio: Tensor, log_probs: Tensor, advantages: Tensor) -> Surrogate:
    """The bounded loss of each token.

    log_ratio: from `log_ratios`. log_probs: log pi(y_t) with the gradient. advantages: constants. All [...].
    """
    # Bounds that stop no gradient report no clipped token.
    nowhere = torch.zeros_like(advantages, dtype=torch.bool)
    if isinstance(bound, Reinforce):
        return Surrogate(-advantages * log_probs, nowhere, nowhere)
    rho = exp(log_ratio)
    if isinstance(bound, Clip):
        # The minimum takes the clipped, constant side only where rho has moved the way that A rewards; on the other side
        # the gradient stays, to bring rho back. These are the tokens that it stops.
        low, high = (rho < 1 - bound.low) & (advantages < 0), (rho > 1 + bound.high) & (advantages > 0)
        # Dual clip: where A < 0, rho A is unbounded below; a maximum of rho bounds it. Where A > 0 the minimum below takes
        # the side of `clipped` anyway, since dual > 1 + high.
        kept = rho if bound.dual is None else rho.clamp(max=bound.dual)
        clipped = rho.clamp(1 - bound.low, 1 + bound.high)
        return Surrogate(-torch.minimum(kept * advantages, clipped * advantages), low, high)
    if isinstance(bound, Sapo):
        # 4 / tau makes the slope at rho = 1 that of rho A itself.
        tau = _choose(advantages > 0, bound.positive, bound.negative)
        return Surrogate(-4 * torch.sigmoid(tau * (rho - 1)) / tau * advantages, nowhere, nowhere)
    if isinstance(bound, Cispo):
        weight, low, high = rho.clamp(bound.low, bound.high), rho < bound.low, rho > bound.high
    else:
        positive = advantages >= 0
        power, rate = _choose(positive, *bound.power), _choose(positive, *bound.rate)
        # w^k e^(b (1 - w)), as an exponent: w^k alone would overflow.
        log_w = log_ratio.clamp(math.log(1e-8), LIMIT)
        weight, low, high = (rate + power * log_w - rate * log_w.exp()).exp(), nowhere, nowhere
    # Score function: the weight is a constant, and log pi carries the gradient; so bounding the weight keeps it for each
    # token.
    return Surrogate(-weight.detach() * advantages * log_probs, low, high)


def geometric_clip(bound: Clip, log_rho: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """GMPO's clip of each log-ratio, by the sign of A: (clipped log-ratios, below, above); [...].

    At most `high` where A > 0, at least -`low` where A < 0: here they are distances of log rho from 0; the paper has 0.4.
    """
    low, high = (log_rho < -bound.low) & (advantages < 0), (log_rho > bound.high) & (advantages > 0)
    upper = _choose(advantages > 0, bound.high, math.inf)
    lower = _choose(advantages < 0, -bound.low, -math.inf)
    return torch.minimum(torch.maximum(log_rho, lower), upper), low, high


def _choose(where: Tensor, yes: float, no: float) -> Tensor:
    """fp64; torch.where would make fp32 of two floats."""
    return torch.full_like(where, no, dtype=torch.float64).masked_fill(where, yes)
