"""Seconds of a weight sync (reallocation) between two places of a model: exact bytes of each link, by tier."""

from __future__ import annotations

from collections import defaultdict
from math import inf

import torch

from meshkit.algos.plan_rl._costs import TRAINED_BYTES, PlannedModel
from meshkit.algos.plan_rl._problem import Alternative
from meshkit.algos.reallocate import Layout, ReallocationPlan, layout_of, plan_reallocation
from meshkit.cluster import Cluster, hop_s

BUCKET_BYTES = 2**30  # bytes of links do not depend on it, and large pieces are planned faster


class Moves:
    """`seconds` and `least_s` of a problem. Plans are kept, and equal ones further along the ranks made once."""

    def __init__(
        self, models: dict[str, PlannedModel], cluster: Cluster, *, unit_ranks: int, dtype: torch.dtype
    ) -> None:
        self.models, self.cluster, self.unit_ranks, self.dtype = models, cluster, unit_ranks, dtype
        self._layouts: dict[tuple[str, int, int, str], Layout] = {}
        self._seconds: dict[tuple[object, ...], float] = {}

    def plan(self, model: str, source: Alternative, destination: Alternative) -> ReallocationPlan:
        """What the sync sends: of parameters in the dtype that they compute in."""
        return plan_reallocation(
            self._layout(model, source),
            self._layout(model, destination),
            bucket_bytes=BUCKET_BYTES,
            ranks_per_node=self.cluster.tiers[0].ranks,
        )

    def seconds(self, model: str, source: Alternative, destination: Alternative) -> float:
        """Of the rank that sends or receives longest."""
        # Whole nodes further along everything is the same; so is it for units of a node, by where they begin in it.
        node_units = max(1, self.cluster.tiers[0].ranks // self.unit_ranks)
        first = min(source.first, destination.first) // node_units * node_units
        key = model, source.first - first, source.place[1:], destination.first - first, destination.place[1:]
        if key not in self._seconds:
            sent: defaultdict[int, float] = defaultdict(float)
            received: defaultdict[int, float] = defaultdict(float)
            for (one, other), size in self.plan(model, source, destination).links.items():
                took = hop_s(self.cluster, size, one, other)
                sent[one] += took
                received[other] += took
            self._seconds[key] = max([0.0, *sent.values(), *received.values()])
        return self._seconds[key]

    def least_s(self, model: str, source: Alternative, destination: Alternative) -> float:
        """At most `seconds`: the rank that holds most in the destination receives it, less what it may hold before."""
        lacking = destination.static_bytes.get(model, 0.0)
        if set(source.units) & set(destination.units):
            lacking -= source.static_bytes.get(model, 0.0) / TRAINED_BYTES * self.dtype.itemsize
        if lacking <= 0:
            return 0.0
        ranks = self.cluster.tiers[0].ranks
        inside = hop_s(self.cluster, lacking, 0, 1) if ranks > 1 else inf
        outside = hop_s(self.cluster, lacking, 0, ranks) if self.cluster.ranks > ranks else inf
        return min(inside, outside)

    def _layout(self, model: str, alternative: Alternative) -> Layout:
        key = model, *alternative.place
        if key not in self._layouts:
            begin = alternative.first * self.unit_ranks
            ranks = range(begin, begin + alternative.count * self.unit_ranks)
            planned = self.models[model]
            self._layouts[key] = layout_of(
                planned.module, alternative.layout, plan=planned.plan, ranks=ranks, dtype=self.dtype
            )
        return self._layouts[key]
