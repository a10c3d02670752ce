"""Zero-bubble backward in two halves: I, the input gradient for the stage before, and W, the weight gradients, later.

In an I, linear layers store (input, gradient of output) instead of multiplying them to the weight's gradient; the W runs the
products. Gradients of norms, biases and embeddings are cheap and are computed in I.
Source: Qi et al. 2023, zero bubble pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from meshkit.core.double_backward import once_differentiable
from meshkit.core.patch_class import patch_class
from meshkit.parallel.tensor.local import inside_forward


class DeferredWeightGradients:
    """The products of one microbatch's weight gradients, to be run in W."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def run(self) -> None:
        work, self.work = self.work, []
        for product in work:
            product()


def _accumulate(module: nn.Linear, x: Tensor, dout: Tensor) -> None:
    """weight.grad += dout' x.

    Accumulates through a view of the parameter that is made now. The view of the forward may belong to a region that
    recompute runs again, whose graph is gone by the time of W.
    """
    # Backward may run without grad mode, but the view needs a graph that carries the gradient to the parameter.
    with torch.enable_grad():
        weight = inside_forward(module, "weight")
    product = rearrange(dout, "... out -> (...) out").mT @ rearrange(x, "... c -> (...) c")
    torch.autograd.backward(weight, product.to(weight.dtype))


# A stack, the innermost in use. Global and not a context variable: on CUDA backward runs in autograd's own threads.
_deferring: list[DeferredWeightGradients] = []


def weight_gradient(work: Callable[[], None]) -> None:
    """Run `work`, which only computes gradients of weights: in W where the schedule has one, else at once.

    For the backward of your own autograd functions.
    """
    if _deferring:
        _deferring[-1].work.append(work)
    else:
        work()


@contextmanager
def defer_weight_gradients(deferred: DeferredWeightGradients) -> Iterator[None]:
    """Inside, backwards add their products of weight gradients to `deferred` instead of running them."""
    _deferring.append(deferred)
    try:
        yield
    finally:
        _deferring.pop()


class _Linear(torch.autograd.Function):
    """F.linear whose backward computes the weight's gradient by `weight_gradient`, at once or in W.

    The weight is detached, so it is no differentiable input of this node: else autograd would already visit in I the node
    that made it. `anchor` requires a gradient, so that the output does even where x does not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, module: nn.Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable(
        "a pipeline schedule that splits backwards computes gradients of weights apart.", "Use the schedule 1f1b"
    )
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        # The input gradient is computed at once: the stage before waits for it.
        dx = dout @ weight if ctx.needs_input_grad[0] else None
        weight_gradient(partial(_accumulate, ctx.module, x, dout))
        return dx, None, None, None


def split_linears(module: nn.Module) -> None:
    """Make the weight gradients of all plain linear layers deferrable, in place."""
    for child in module.modules():
        # Only layers whose forward is nn.Linear's own: which products another forward makes is not known here.
        if type(child).forward is nn.Linear.forward and child.weight.requires_grad:
            patch_class(child, forward=_linear_forward)


def _linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    weight = self.weight
    # There is no gradient to defer, and `anchor` would be memory for each layer.
    if not torch.is_grad_enabled():
        return F.linear(x, weight, self.bias)
    # The bias is added outside of the node: its gradient is a cheap sum, which autograd then makes in I.
    out: Tensor = _Linear.apply(x, x.new_zeros((), requires_grad=True), weight.detach(), self)
    return out if self.bias is None else out + self.bias
