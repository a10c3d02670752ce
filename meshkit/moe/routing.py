"""Mixture-of-experts routing (token permutation): rows are sorted by expert for dispatch, and combined after the experts.

A token that chose K experts is K rows, one for each (token, choice) pair. Nothing here knows a mesh.
Dims: N tokens, K experts that a token chooses, M rows: (token, choice) pairs, C features, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from meshkit.core import _torch


class Routing(NamedTuple):
    """experts: [N, K] int64, those that each token chose. weights: [N, K], of their outputs in the sum, fp32 at least.
    least: [E], the least capacity that each expert needs, of a router that was asked for it; see `least_capacity`."""

    experts_NK: Tensor
    weights_NK: Tensor
    least_E: Tensor | None = None


@torch.no_grad()
def least_capacity(x_NC: Tensor, weight_EC: Tensor, experts_NK: Tensor) -> Tensor:
    """[E], fp32 or wider: exp(C d^2 / (2 - d^2)) / E pairs, d the largest cosine between an expert's routing vector and a
    token that chose it; 1 / E for an expert that no token chose.

    Of tokens in random directions of C dims about a share of exp(-C d^2 / (2 - d^2)) lies as close to a vector: so many must
    be looked at, by E experts together, for one that is as much an expert's own. It ends at as many as there are pairs.
    Source: Li et al. 2024 (LocMoE), theorem 1, the last form of its bound. Its d is a threshold, the cosine from which on a
    token is taken to be the expert's: where a token reaches it, this capacity is at least that one.
    """
    wide = torch.promote_types(x_NC.dtype, torch.float32)
    experts = len(weight_EC)
    cosines_NE = F.normalize(x_NC.to(wide), dim=-1) @ F.normalize(weight_EC.to(wide), dim=-1).t()
    # A column more for the index of no expert.
    chosen_NK = F.pad(cosines_NE, (0, 1)).gather(-1, experts_NK).clamp(min=0)
    best_E = cosines_NE.new_zeros(experts + 1).scatter_reduce(0, experts_NK.flatten(), chosen_NK.flatten(), "amax")[:-1]
    squares_E = best_E.square()
    return (x_NC.shape[-1] * squares_E / (2 - squares_E)).exp().div(experts).clamp(max=float(experts_NK.numel()))


class Overlapped:
    """Work that needs no routed expert, such as the shared expert: a dispatcher runs it while rows travel to other ranks.

    It runs once: in `run`, or in `result` if no dispatcher did.
    """

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
    """How often each expert occurs in the last dim: [..., n] -> [..., E] int64. The host does not wait for the device.

    An index of E is no expert (transformers' sentinel), and is not counted.
    For choices without values (fake tensors) the counts have values, as even as can be.
    """
    # `estimate` runs on fake tensors, and sizes of messages and of grouped products are read from the counts.
    if not torch.compiler.is_compiling() and _torch.is_fake(experts):
        least, rest = divmod(experts.shape[-1], num_experts)
        even = torch.tensor([least + (expert < rest) for expert in range(num_experts)])
        return even.expand(*experts.shape[:-1], num_experts).contiguous()
    counts = experts.new_zeros((*experts.shape[:-1], num_experts + 1))
    return counts.scatter_add_(-1, experts, torch.ones_like(experts))[..., :-1]


def sort_by_expert(experts_NK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """([N * K]: the (token, choice) pairs sorted by expert; [E]: the number of pairs of each expert), both int64.

    Pair n * K + k is choice k of token n. The sort is stable: an expert gets its tokens in their order. Pairs of no expert,
    whose number is E, are last, and are not counted.
    """
    expert_of_pair = rearrange(experts_NK, "n k -> (n k)")
    return expert_of_pair.argsort(stable=True), count_experts(expert_of_pair, num_experts)


def take_rows(x_NC: Tensor, order_M: Tensor, *, choices: int) -> Tensor:
    """The token's row for each pair of `order`: [M, C]."""
    # Each row is written out once for each choice before the pairs are taken. Then the backward of `repeat` adds the K
    # gradients of a token in one sum, in fp32 inside; that of an index_select with repeated indices would add them one by
    # one, in any order and in x's dtype.
    return repeat(x_NC, "n c -> (n k) c", k=choices).index_select(0, order_M)


def combine(rows_MC: Tensor, order_M: Tensor, weights_NK: Tensor) -> Tensor:
    """The weighted sum of each token's rows: [N, C], in the weights' dtype, fp32 at least. The inverse of `take_rows`.

    Pairs that are not in `order_M` were dropped, and add nothing.
    """
    tokens, choices = weights_NK.shape
    if len(order_M) < tokens * choices:
        rows = rows_MC.new_zeros(tokens * choices, rows_MC.shape[-1]).index_copy(0, order_M, rows_MC)
    else:
        # The inverse permutation: reading by it is deterministic, and so is its backward, which writes each row once.
        inverse_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
        rows = rows_MC.index_select(0, inverse_M)
    return weighted_sum(rows, weights_NK)


def weighted_sum(pairs_MC: Tensor, weights_NK: Tensor) -> Tensor:
    """The sum of each token's rows, which lie in the order of tokens, by their weights: [N, C], in the weights' dtype."""
    tokens, choices = weights_NK.shape
    rows_NKC = rearrange(pairs_MC, "(n k) c -> n k c", n=tokens, k=choices)
    out_NC: Tensor = (rows_NKC.to(weights_NK.dtype) * weights_NK.unsqueeze(-1)).sum(1)
    return out_NC
