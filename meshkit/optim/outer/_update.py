"""What a mean change does to the outer parameters: the outer step of DiLoCo (Nesterov) and of CO2 (penalty, clipping)."""

from __future__ import annotations

from torch import Tensor

from meshkit.optim.outer._policy import CO2, DiLoCo


def outer_step(policy: DiLoCo | CO2, parameter: Tensor, momentum: Tensor, change: Tensor) -> None:
    """Move the outer parameter, in place. change: the mean of what replicas began with less what they have, [size]."""
    if isinstance(policy, DiLoCo):
        momentum.mul_(policy.momentum).add_(change)
        parameter.sub_(change + policy.momentum * momentum, alpha=policy.lr)
        return
    if policy.penalty == "gap":
        moved = policy.lr * momentum.abs()  # by the last outer step, which was after the change began
        # change / (1 + moved / |change|), which is 0 for a change of 0
        size = change.abs()
        change = change * size / (size + moved).clamp(min=1e-38)
    else:
        change = change / policy.penalty
    momentum.mul_(policy.momentum).add_(change).clamp_(-policy.clip, policy.clip)
    parameter.sub_(momentum, alpha=policy.lr)
