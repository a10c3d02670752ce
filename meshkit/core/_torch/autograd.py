"""Autograd: nodes of a graph (what reduced a loss, its factors, what a backward runs), and who starts a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .tracing import graph_node, without_modes

# `_saved_*` of a node are the attributes that torch's notes on autograd show; each name is one of derivatives.yaml.


def reduction_of(node: Any) -> Literal["mean", "sum"] | None:
    """The `reduction=` of one of torch's losses.

    Private: Node._saved_reduction. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    reduction = getattr(node, "_saved_reduction", None)
    return "mean" if reduction == 1 else "sum" if reduction == 2 else None


def saved_factor(node: Any) -> Tensor | None:
    """What a product multiplies its only input with a gradient by, or a quotient divides it by, if it is known.

    Private: Node._saved_other, Node._saved_self. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    is_product = node.name().startswith("Mul")
    if not is_product and node.next_functions[0][0] is None:
        return None  # the input is what is divided by
    other = getattr(node, "_saved_other", None)
    other = getattr(node, "_saved_self", None) if other is None and is_product else other
    if type(other) is Tensor and (other.device.type != "cpu" or other.ndim):
        return other
    if type(other) is Tensor:
        with without_modes():  # which would be told of a number of Python, and not of a tensor
            other = other.item()
    return torch.tensor(other) if isinstance(other, int | float) else None


def sums_rows(node: Any) -> bool:
    """Whether it is a sum over all dims, or over the first one among others.

    Private: Node._saved_dim, Node._saved_self_sym_sizes. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    if not node.name().startswith(("SumBackward", "NansumBackward")):
        return False
    dims, sizes = getattr(node, "_saved_dim", None), getattr(node, "_saved_self_sym_sizes", ())
    # A negative dim is saved as an unsigned number of 64 bits, and an empty list stands for all.
    return not dims or any(dim in (0, 2**64 - len(sizes)) for dim in dims)


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that a backward of it gives gradients to.

    Private: Node.variable, of those that accumulate. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    rest, seen, leaves = [graph_node(tensor)], set[Any](), list[Tensor]()
    while rest:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            leaves.append(node.variable)
        rest += [each for each, _ in node.next_functions]
    return leaves


@contextmanager
def before_backwards(act: Callable[[Sequence[Tensor], Sequence[Any]], None]) -> Iterator[None]:
    """Inside, `act(roots, inputs)` is called before each backward that Python starts. inputs: as of torch.autograd.grad.

    Private: torch.autograd._engine_run_backward, looked up in that module by `grad` and `backward`. Checked: 2.11, 2.15.
    Replaced by: nothing yet.
    """
    module: Any = torch.autograd
    run = module._engine_run_backward

    def seen(outputs: Any, grads: Any, keep: Any, create: Any, inputs: Any = (), *args: Any, **kwargs: Any) -> Any:
        act([each for each in outputs if isinstance(each, Tensor)], inputs or ())
        return run(outputs, grads, keep, create, inputs, *args, **kwargs)

    module._engine_run_backward = seen
    try:
        yield
    finally:
        module._engine_run_backward = run


def in_functional_grad() -> bool:
    """Whether what runs now is differentiated by torch.func (grad, vjp), alone or inside of vmap.

    Private: torch._C._functorch, by whose interpreters torch.func works. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    functorch: Any = torch._C._functorch
    return any(each.key() == functorch.TransformType.Grad for each in functorch.get_interpreter_stack() or ())


def nodes_run(roots: Sequence[Tensor], inputs: Sequence[Any] = ()) -> tuple[set[Any], set[Any]]:
    """(the nodes of the graph that a backward runs, those of its inputs). inputs: none are all leaves."""
    with torch._C.DisableTorchFunction():
        begin = [get_gradient_edge(root).node for root in roots if root.requires_grad]
        ends = [each[0] if isinstance(each, GradientEdge) else get_gradient_edge(each).node for each in inputs]
    readers: dict[Any, list[Any]] = {node: [] for node in begin}
    left = list(readers)
    for node in left:  # it grows
        for other, _ in () if node in ends else node.next_functions:
            if other is not None:
                if other not in readers:
                    left.append(other)
                readers.setdefault(other, []).append(node)
    if not ends:
        return set(readers), set()
    reached = {node for node in ends if node in readers}
    found, left = set(reached), list(reached)
    for node in left:
        for reader in readers[node]:
            if reader not in found:
                found.add(reader)
                left.append(reader)
    return found - reached, reached


@contextmanager
def graph_inside() -> Iterator[None]:
    """Inside of a custom operator, where dispatch is below autograd: a graph is made as outside of it.

    Private: torch._C._SetExcludeDispatchKeyGuard, as torch.utils.checkpoint has it. Checked: 2.15. Replaced by: nothing yet.
    """
    keys = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
        torch.enable_grad(),
    ):
        yield
