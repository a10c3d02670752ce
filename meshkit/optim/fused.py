"""torch's fused AdamW on the local shards of DTensor parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from meshkit.core.sharding import local_tensor, placed


class ShardedAdamW(torch.optim.AdamW):
    """AdamW(..., fused=True) on local shards: the same kernel and bit-identical updates; state is sharded as parameters are.

    The update is elementwise, so its result has the parameter's placements, and DTensor need not propagate them. With torch
    2.15 that propagation takes 0.08 s of each rank's CPU for each parameter shape on three axes, and 0.8 s on four.
    Wire: nothing.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch's is a decorated one
        loss = loss_of(closure)
        for group in self.param_groups:
            self.update(group)
        return loss

    def update(self, group: dict[str, Any]) -> None:
        """Of one group of parameters."""
        # State is created at the first step, as torch does: a parameter that never has a gradient costs none.
        params = [param for param in group["params"] if param.grad is not None]
        for param in params:
            if not self.state[param]:
                self.state[param] = _zeros(param)
        states = [self.state[param] for param in params]
        beta1, beta2 = group["betas"]
        # torch's functional form: the kernel of AdamW(fused=True) without DTensor's dispatch.
        adamw(
            [local_tensor(param) for param in params],
            [local_tensor(placed_gradient(param)) for param in params],
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


def placed_gradient(param: Tensor) -> Tensor:
    """The gradient with its parameter's placements.

    torch 2.11 leaves full gradients on unevenly sharded parameters of a compiled block: see `_torch.local_shard`.
    """
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


# Shared by all optimizers here: a closure's loss, sharded state, and loading of state without a change of dtype.


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure of an optimizer's step returns, with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def paired_states(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """(parameter, its state) of a state_dict; afterwards the groups' options are set too. torch's own casts the state."""
    groups = list(zip(optimizer.param_groups, state_dict["param_groups"], strict=True))
    for group, saved in groups:
        for param, index in zip(group["params"], saved["params"], strict=True):
            yield param, state_dict["state"].get(index, {})
    # After the last state: where a caller refuses one, the options are as they were.
    for group, saved in groups:
        group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
