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


class Saves(torch.autograd.Function):
    """Its gradient is multiplied by what `make` gave for the input in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(make(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


class Keeps(Saves):
    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.kept = make(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.kept, None


@pytest.mark.parametrize("function", [Saves, Keeps])
def test_what_a_backward_reads_beside_gradients_is_a_part_of_what_one_device_reads(function: Any) -> None:
    prove(Pair(function.apply, torch.tanh))
    prove(Pair(function.apply, lambda x: x.new_full((1,), 3.0)))
    for make in (
        lambda x: torch.linspace(0.5, 1.5, x.shape[-1]),  # of the part, not a part of it
        lambda x: torch.tensor(x.shape[-1] ** -0.5),
        lambda x: x.softmax(-1),  # which the forward never uses
        lambda x: x.flip(-1),
    ):
        with pytest.raises(Unproved):
            prove(Pair(function.apply, make))


class Centred(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return centred(grad)


def under_vmap(x: Tensor, change: Any) -> Tensor:
    return torch.vmap(Centred.apply)(x)


def node_hooked(x: Tensor, change: Any) -> Tensor:
    x = x * 1
    x.grad_fn.register_hook(lambda grads, outs: tuple(centred(grad) if grad is not None else None for grad in grads))
    return x


def node_prehooked(x: Tensor, change: Any) -> Tensor:
    x = x * 1
    x.grad_fn.register_prehook(lambda outs: tuple(map(centred, outs)))
    return x


def saved_otherwise(x: Tensor, change: Any) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.flip(-1)):
        return x * x.tanh()


@pytest.mark.parametrize("between", [under_vmap, node_hooked, node_prehooked, saved_otherwise])
def test_a_backward_that_nothing_shows_needs_the_whole_gradient(between: Any) -> None:
    with pytest.raises(Unproved, match="reads a gradient"):
        prove(Pair(between, clipped))


def test_saving_on_the_host_changes_no_backward() -> None:
    def between(x: Tensor, change: Any) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return x * x.tanh()

    prove(Pair(between, clipped))
