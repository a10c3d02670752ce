"""Backwards that a model writes itself: noted where they stand, and proved on parts only if element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshkit.parallel.tensor.layout import tensor_layout
from meshkit.parallel.tensor.proof import prove_layout
from meshkit.plan import column, row
from meshkit.program import Example, Unproved, read_program, trace


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.change(grad), None


def hooked(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    x.register_hook(change)
    return x * 2


class Pair(nn.Module):
    def __init__(self, between: Callable[..., Tensor], change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.between, self.change = nn.Linear(6, 8), nn.Linear(8, 6), between, change

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x), self.change))


def clipped(grad: Tensor) -> Tensor:
    return grad.clamp(-1, 1) * 3


def centred(grad: Tensor) -> Tensor:
    return grad - grad.mean(-1, keepdim=True)


def by_width(grad: Tensor) -> Tensor:
    return grad / grad.shape[-1]


def looked_at(grad: Tensor) -> None:
    grad.abs().max()


def prove(model: nn.Module) -> None:
    layout = tensor_layout(model, {"up": column(), "down": row()}, size=2, sequence=False)
    prove_layout(read_program(model), layout, Example((torch.zeros(3, 6),)))


@pytest.mark.parametrize("between", [Own.apply, hooked])
def test_of_a_part_a_backward_is_proved_element_by_element(between: Any) -> None:
    prove(Pair(between, clipped))
    for change in (centred, by_width):
        with pytest.raises(Unproved, match="reads a gradient|another backward"):
            prove(Pair(between, change))


def test_a_hook_that_only_looks_is_no_operation() -> None:
    prove(Pair(hooked, looked_at))


def test_a_modules_backward_hook_needs_the_whole_gradient() -> None:
    model = Pair(lambda x, change: x.tanh(), clipped)
    model.down.register_full_backward_hook(lambda module, grads, outs: (centred(grads[0]),))
    with pytest.raises(Unproved, match="reads a gradient"):
        prove(model)


def test_a_checkpoint_that_recomputes_is_read_as_what_it_computes() -> None:
    class Checkpointed(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=True)

    read = trace(Checkpointed(lambda x, change: x.tanh(), clipped), (torch.zeros(3, 6, requires_grad=True),), {})
    assert all(operation.grad_mode for operation in read.operations)
