"""Importance ratios: how much likelier the policy makes what was written than the policy that wrote it.

log rho_t = log pi(y_t) - log pi_old(y_t).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from meshkit.algos.policy._segments import SegmentIndex

Ratio = Literal["token", "sequence", "sequence_token", "trajectory", "geometric"]
RATIOS: tuple[Ratio, ...] = ("token", "sequence", "sequence_token", "trajectory", "geometric")

LIMIT = 20.0  # e^20 is half a billion: beyond it a ratio is constant and passes no gradient, as in verl


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
        return answers.spread(answers.means(log_rho.detach())) + log_rho - log_rho.detach()
    if ratio == "trajectory":
        return answers.spread(answers.sums(log_rho)[0])
    return log_rho
