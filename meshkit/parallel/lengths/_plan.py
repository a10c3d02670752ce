"""A plan of a step's documents over ranks and microbatches, as data: who computes how many tokens of which document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from meshkit.parallel.lengths._costs import LengthCosts

Shares = tuple[tuple[int, int], ...]
"""(rank, tokens) of a document, in the order in which its ranks lie along it; none without tokens"""
Runs = tuple[tuple[int, int], ...]
"""the tokens [first, after) of a document that one rank computes"""
Placed = list[tuple[int, Shares]]
"""(microbatch, shares) of each document"""
Pace = Literal["step", "microbatch", "pipeline"]
"""when ranks wait for each other: at the end of a step, in every microbatch, or in microbatches that take equally long"""
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthPlan:
    """Which rank computes which part of which document in which microbatch. Print it.

    lengths, areas: tokens and visible pairs of each document. microbatch_of, shares: of each document. pace: when ranks
    wait for each other.
    A document of several ranks is cut in zigzag: rank i has a piece of its first half and the mirrored one of its second, so
    its part of a causal document's pairs is that of the tokens, whatever that part is.
    """

    rule: str
    lengths: tuple[int, ...]
    areas: tuple[float, ...]
    ranks: int
    microbatches: int
    costs: LengthCosts
    pace: Pace
    microbatch_of: tuple[int, ...]
    shares: tuple[Shares, ...]

    @cached_property
    def tokens(self) -> Numbers:
        """[microbatch, rank]"""
        tokens: Numbers = self._table[0]
        return tokens

    @cached_property
    def received(self) -> Numbers:
        """[near or far, microbatch, rank]: keys that come from other ranks, of the same node and of others."""
        received: Numbers = self._table[2:4]
        return received

    @cached_property
    def seconds(self) -> Numbers:
        """[microbatch, rank]: of one layer, forward and backward."""
        tokens, pairs, near, far = self._table
        costs = self.costs
        seconds: Numbers = costs.token_s * tokens + costs.pair_s * pairs + costs.near_s * near + costs.far_s * far
        return seconds

    @cached_property
    def _table(self) -> Numbers:
        """[tokens, pairs, near keys, far keys; microbatch; rank]"""
        table = np.zeros((4, self.microbatches, self.ranks))
        for index, shares in enumerate(self.shares):
            microbatch, density = self.microbatch_of[index], self.areas[index] / max(self.lengths[index], 1)
            for rank, tokens in shares:
                table[0, microbatch, rank] += tokens
                table[1, microbatch, rank] += tokens * density
            for rank, near, far in keys_received(shares, self.costs.node):
                table[2, microbatch, rank] += near
                table[3, microbatch, rank] += far
        return table

    @property
    def step_s(self) -> float:
        """Of one layer, in all microbatches: the slowest rank of each, or where ranks do not wait, the slowest of all."""
        return float(self.seconds.max(1).sum() if self.pace != "step" else self.seconds.sum(0).max())

    @property
    def max_over_mean(self) -> float:
        """Seconds of the busiest rank over the mean; 1 is balanced."""
        return self.step_s * self.ranks / max(float(self.seconds.sum()), 1e-300)

    @property
    def most_tokens(self) -> int:
        """That a rank has in a microbatch."""
        return int(self.tokens.max(initial=0))

    @property
    def sent_bytes(self) -> float:
        """By all ranks for one layer, forward and backward."""
        return float(self.received.sum()) * self.costs.key_bytes

    @property
    def cut(self) -> int:
        """Documents on more than one rank."""
        return sum(len(shares) > 1 for shares in self.shares)

    def __str__(self) -> str:
        widest = max(map(len, self.shares), default=0)
        return (
            f"{self.rule}: {1e3 * self.step_s:.3g} ms and {self.sent_bytes:.4g} bytes a layer, max/mean "
            f"{self.max_over_mean:.3f}, {self.cut} of {len(self.lengths)} documents on 2 to {max(widest, 2)} ranks, at most "
            f"{self.most_tokens} tokens on a rank in one of {self.microbatches} microbatches"
        )


def document_runs(shares: Shares) -> Iterator[tuple[int, Runs]]:
    """(rank, its tokens of the document) in zigzag: of what rank i has, half lies before the middle and half behind it."""
    halves = [tokens // 2 for _, tokens in shares]
    rests = [tokens - half for (_, tokens), half in zip(shares, halves, strict=True)]
    edges = list(pairwise(accumulate([*halves, *reversed(rests)], initial=0)))
    for index, (rank, _) in enumerate(shares):
        yield rank, tuple(edge for edge in (edges[index], edges[-1 - index]) if edge[0] < edge[1])


def keys_received(shares: Sequence[tuple[int, int]], node: int) -> Iterator[tuple[int, int, int]]:
    """(rank, keys from ranks of its node, keys from others) of a causal document.

    Rank i needs all tokens of the ranks behind it, of which it sees both pieces, and the first pieces of those before it.
    """
    # Sums over the ranks of each node, since a long document may lie on many nodes.
    whole: dict[int, int] = {}
    for rank, tokens in shares:
        whole[rank // node] = whole.get(rank // node, 0) + tokens
    behind, before = sum(tokens for _, tokens in shares), 0
    first: dict[int, int] = {}
    for rank, tokens in shares:
        home = rank // node
        behind -= tokens
        whole[home] -= tokens
        near = whole[home] + first.get(home, 0)
        yield rank, near, behind + before - near
        before += tokens // 2
        first[home] = first.get(home, 0) + tokens // 2
