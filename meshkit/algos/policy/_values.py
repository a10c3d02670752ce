"""The value loss: what a critic minimises."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshkit.algos.policy._segments import SegmentIndex, refuse_other_shapes


class ValueLosses(NamedTuple):
    """losses: [...] fp64 with the gradient; sum them and divide by the tokens of the step. clipped: [...] bool."""

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

    values: V of what was read before each label, with the gradient. returns, old_values: constants. All [...].
    Without old values nothing is clipped. Source: PPO2 of OpenAI baselines; the same in TRL and verl.
    """
    refuse_other_shapes("value_losses", answers, [("values", values), ("returns", returns), ("old_values", old_values)])
    value, target = answers.only(values), answers.only(returns.detach())
    plain = (value - target).square()
    if clip is None or old_values is None:
        return ValueLosses(plain / 2, torch.zeros_like(answers.mask))
    old = answers.only(old_values.detach())
    near = (old + (value - old).clamp(-clip, clip) - target).square()
    return ValueLosses(torch.maximum(plain, near) / 2, near > plain)
