"""Which (token, choice) pairs an expert takes when it takes only so many."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

import torch
from torch import Tensor

from meshkit.errors import PlanError
from meshkit.routing import Routing


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Each expert takes at most factor * N * K / E of a rank's own pairs, rounded up; the rest are dropped and count nothing.

    drop: "probability" keeps the pairs with the largest weights, "position" the first tokens. A rank drops of its own tokens
    without asking others, so what is dropped depends on the mesh.
    Source: Fedus et al. 2022, section 2.2; dropping of own tokens: Liu et al. 2025 (parallel folding).
    """

    factor: float
    drop: Literal["probability", "position"] = "probability"

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise PlanError(
                f"Capacity: factor={self.factor} leaves no room. 1.0 is the even share; leave capacity away for no limit."
            )
        if self.drop not in ("probability", "position"):
            raise PlanError(f"Capacity: drop={self.drop!r} is not known. Use probability or position.")

    def kept(self, routing: Routing, order_M: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """(the pairs of `sort_by_expert` in its order, those that stay first, how many stay of each expert).

        How many stay in all is in the counts: the host need not wait here.
        """
        pairs, experts = len(order_M), len(counts_E)
        limit = ceil(self.factor * pairs / experts)
        place_M = torch.arange(pairs, device=order_M.device)
        first_M = (counts_E.cumsum(0) - counts_E).repeat_interleave(counts_E, output_size=pairs)
        rank_M = place_M - first_M  # among the pairs of the same expert
        if self.drop == "probability":
            weights_M = routing.weights_NK.detach().flatten()[order_M]
            expert_M = routing.experts_NK.flatten()[order_M]
            by_weight = weights_M.argsort(descending=True, stable=True)
            by_expert = by_weight[expert_M[by_weight].argsort(stable=True)]
            rank_M = torch.empty_like(place_M).scatter_(0, by_expert, rank_M)
        return order_M[(rank_M >= limit).to(torch.uint8).argsort(stable=True)], counts_E.clamp(max=limit)
