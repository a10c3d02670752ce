"""torch's fused AdamW on the parts of sharded parameters that this rank has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from meshkit.memory.optimizer._shared import loss_of, placed
from meshkit.sharding import local_tensor


class OwnPartsAdamW(torch.optim.AdamW):
    """The same update, bit for bit, of the same kernel, as `AdamW(..., fused=True)`; state is sharded as its parameter.

    An update is the same whatever the placements are, so DTensor need not work out what it becomes: with torch 2.15 that
    takes 0.08 s of each rank's processor for each shape of a parameter on three axes, and 0.8 s on four.
    Wire: nothing.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch's is a decorated one
        loss = loss_of(closure)
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if not self.state[param]:
                    self.state[param] = _zeros(param)
            states = [self.state[param] for param in params]
            beta1, beta2 = group["betas"]
            adamw(
                [local_tensor(param) for param in params],
                [local_tensor(_placed_gradient(param)) for param in params],
                [local_tensor(state["exp_avg"]) for state in states],
                [local_tensor(state["exp_avg_sq"]) for state in states],
                max_exp_avg_sqs=[],
                state_steps=[local_tensor(state["step"]) for state in states],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        return loss


def _placed_gradient(param: Tensor) -> Tensor:
    """Of uneven parts of a compiled block torch 2.11 leaves whole gradients: see `_torch.own_part`."""
    grad = param.grad
    assert grad is not None
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return grad


def _zeros(param: Tensor) -> dict[str, Tensor]:
    local = local_tensor(param)
    return {
        "step": torch.zeros((), dtype=torch.float32, device=local.device),
        "exp_avg": placed(param, torch.zeros_like(local)),
        "exp_avg_sq": placed(param, torch.zeros_like(local)),
    }
