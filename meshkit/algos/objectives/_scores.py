"""The functions of log-ratios that preference objectives are made of. They stay finite, and so do their gradients."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")


def score(log_ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(pi / pi_ref), the reward over beta. Source: Wang et al. 2023 (2309.16240), table 1."""
    if divergence == "forward_kl":
        return 1 - _exp(-log_ratio)
    if divergence == "js":
        return math.log(2) + F.logsigmoid(log_ratio)
    if divergence == "alpha" and abs(alpha - 1) > 1e-6:
        return (_exp((alpha - 1) * log_ratio) - 1) / (alpha - 1)
    return log_ratio


def logistic(x: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - s) log sigma(x) - s log sigma(-x)."""
    losses = -F.logsigmoid(x)
    return losses if not label_smoothing else (1 - label_smoothing) * losses - label_smoothing * F.logsigmoid(-x)


def _exp(x: Tensor, limit: float = 30.0) -> Tensor:
    """e^x, and its tangent beyond the limit: a gradient must fit into bf16 and fp32 even after squaring."""
    return x.clamp(max=limit).exp() * (1 + (x - limit).clamp(min=0))
