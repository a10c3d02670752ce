"""Which (token, choice) pairs an expert takes when it takes only so many."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from meshkit.routing import Routing
from meshkit.strategy import Capacity


def keep_within(capacity: Capacity, routing: Routing, order_M: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    """(the pairs of `sort_by_expert` in its order, those that stay first, how many stay of each expert).

    How many stay in all is in the counts: the host need not wait here.
    """
    pairs, experts = len(order_M), len(counts_E)
    limit = ceil(capacity.factor * pairs / experts)
    place_M = torch.arange(pairs, device=order_M.device)
    first_M = (counts_E.cumsum(0) - counts_E).repeat_interleave(counts_E, output_size=pairs)
    rank_M = place_M - first_M  # among the pairs of the same expert
    if capacity.drop == "probability":
        weights_M = routing.weights_NK.detach().flatten()[order_M]
        expert_M = routing.experts_NK.flatten()[order_M]
        by_weight = weights_M.argsort(descending=True, stable=True)
        by_expert = by_weight[expert_M[by_weight].argsort(stable=True)]
        rank_M = torch.empty_like(place_M).scatter_(0, by_expert, rank_M)
    return order_M[(rank_M >= limit).to(torch.uint8).argsort(stable=True)], counts_E.clamp(max=limit)
