"""A backward in two halves: what the stage before waits for, and the weights' gradients, which nobody does.

Linear layers keep the pair (input, gradient of output) of their weight's gradient when told to, and the product is made
later. Gradients of norms, biases' sums and embeddings are cheap and come with the first half.
Source: Qi et al. 2023, zero bubble pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshkit.core.patch_class import patch_class
from meshkit.parallel.tensor.apply import inside_forward


class Later:
    """Gradients of weights that were put off."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def run(self) -> None:
        work, self.work = self.work, []
        for each in work:
            each()


def _accumulate(module: nn.Linear, x: Tensor, dout: Tensor) -> None:
    """weight.grad += dout' x.

    Through a view of the parameter made now: the one that forward used may belong to a recomputed region.
    """
    with torch.enable_grad():
        weight = inside_forward(module, "weight")
    product = dout.flatten(0, -2).mT @ x.flatten(0, -2)
    torch.autograd.backward(weight, product.to(weight.dtype))


_putting_off: list[Later] = []  # the innermost is in use; autograd's threads read it too


def weight_gradient(work: Callable[[], None]) -> None:
    """For the backward of an autograd function: what only makes gradients of weights, now, or with W where the schedule
    computes them apart.
    """
    if _putting_off:
        _putting_off[-1].work.append(work)
    else:
        work()


@contextmanager
def put_off(later: Later) -> Iterator[None]:
    """Inside, backwards leave the gradients of weights to `later`."""
    _putting_off.append(later)
    try:
        yield
    finally:
        _putting_off.pop()


class _Linear(torch.autograd.Function):
    """The weight is no input of this node: autograd would visit what made it, in the first half already.

    anchor requires a gradient, so that the output does even where x does not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, module: nn.Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        dx = dout @ weight if ctx.needs_input_grad[0] else None
        weight_gradient(partial(_accumulate, ctx.module, x, dout))
        return dx, None, None, None


def split_linears(module: nn.Module) -> None:
    """Let the linear layers' weight gradients be put off, in place."""
    for child in module.modules():
        if type(child).forward is nn.Linear.forward and child.weight.requires_grad:
            patch_class(child, forward=_linear_forward)


def _linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    weight = self.weight
    if not torch.is_grad_enabled():
        return F.linear(x, weight, self.bias)
    out: Tensor = _Linear.apply(x, x.new_zeros((), requires_grad=True), weight.detach(), self)
    return out if self.bias is None else out + self.bias
