"""What every optimizer here needs: a closure's loss, state where its parameter is, and state as it was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshkit import _torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure of an optimizer's step returns, with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def placed(param: Tensor, local: Tensor) -> Tensor:
    return _torch.place_like(param, local) if isinstance(param, DTensor) else local


def paired_states(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """(parameter, its state) of a state_dict; afterwards the groups' options are set too. torch's own casts the state."""
    groups = list(zip(optimizer.param_groups, state_dict["param_groups"], strict=True))
    for group, saved in groups:
        for param, index in zip(group["params"], saved["params"], strict=True):
            yield param, state_dict["state"].get(index, {})
    for group, saved in groups:
        group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
