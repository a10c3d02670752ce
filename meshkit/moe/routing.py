"""Which experts each token goes to, and the way of its rows there and back. It knows no mesh.

Dims: N tokens, K experts that a token chooses, M rows: (token, choice) pairs, C features, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from meshkit.core import _torch


class Routing(NamedTuple):
    """experts: [N, K] int64, which ones a token chose. weights: [N, K], what each counts, in fp32 at least."""

    experts_NK: Tensor
    weights_NK: Tensor


class Overlapped:
    """Work that needs no expert, for whoever moves rows to run while they travel. It runs once, at the latest when asked."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self._work = work
        self._out: Tensor | None = None

    def run(self) -> None:
        self.result()

    def result(self) -> Tensor:
        if self._out is None:
            self._out = self._work()
        return self._out


def count_experts(experts: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs in the last dim: [..., n] to [..., E] int64. Nothing is read back from a device.

    Of choices without values, as `estimate` has them, real counts as even as can be.
    """
    if not torch.compiler.is_compiling() and _torch.is_fake(experts):
        least, rest = divmod(experts.shape[-1], num_experts)
        even = torch.tensor([least + (expert < rest) for expert in range(num_experts)])
        return even.expand(*experts.shape[:-1], num_experts).contiguous()
    counts = experts.new_zeros((*experts.shape[:-1], num_experts))
    return counts.scatter_add_(-1, experts, torch.ones_like(experts))


def sort_by_expert(experts_NK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(the (token, choice) pairs in the order of their experts [N * K], pairs of each expert [E]), both int64.

    Pair n * K + k is choice k of token n. The sort is stable: an expert gets its tokens in their order.
    """
    pairs = experts_NK.flatten()
    return pairs.argsort(stable=True), count_experts(pairs, num_experts)


def take_rows(x_NC: Tensor, order_M: Tensor, *, choices: int) -> Tensor:
    """The token of each pair, in order: [M, C].

    Every row is written out `choices` times first: then backward adds those gradients as one sum, in fp32 inside, and not
    one by one in whatever order and in x's dtype.
    """
    return x_NC.unsqueeze(1).expand(-1, choices, -1).flatten(0, 1).index_select(0, order_M)


def combine(rows_MC: Tensor, order_M: Tensor, weights_NK: Tensor) -> Tensor:
    """Undo `take_rows`: the sum of each token's rows by their weights [N, C], in the weights' dtype, fp32 at least.

    Pairs that are not in `order_M` were dropped, and count nothing.
    """
    tokens, choices = weights_NK.shape
    if len(order_M) < tokens * choices:
        rows_all = rows_MC.new_zeros(tokens * choices, rows_MC.shape[-1]).index_copy(0, order_M, rows_MC)
    else:
        places_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
        rows_all = rows_MC.index_select(0, places_M)
    rows_NKC = rows_all.unflatten(0, (tokens, choices))
    out_NC: Tensor = (rows_NKC.to(weights_NK.dtype) * weights_NK.unsqueeze(-1)).sum(1)
    return out_NC
