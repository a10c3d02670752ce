"""Nodes of an autograd graph: what a loss was reduced by, and the numbers that it was multiplied and divided by."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .tracing import without_modes

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
