"""Balancing examples over data ranks and microbatches by tokens (dynamic batching, token budget): who takes what.

Pure functions of lengths, so that ranks which know all lengths decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np

from meshkit.data.bins import first_fit_decreasing
from meshkit.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Which data rank takes which examples of a step, by number, in which microbatches. Print it.

    lengths: tokens of each example. home: the data rank that each example is on beforehand.
    parts: [data rank][minibatch][microbatch] -> numbers of examples. A rank may have fewer microbatches than others, or none.
    microbatches: of each minibatch, the same for all ranks.
    """

    lengths: tuple[int, ...]
    home: tuple[int, ...]
    parts: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    microbatches: tuple[int, ...]

    @cached_property
    def taken(self) -> tuple[tuple[int, ...], ...]:
        """By data rank, the numbers of its examples in the order of its microbatches."""
        return tuple(
            tuple(number for minibatch in of_rank for part in minibatch for number in part) for of_rank in self.parts
        )

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """By data rank."""
        return tuple(sum(self.lengths[number] for number in numbers) for numbers in self.taken)

    @property
    def max_over_mean(self) -> float:
        """Tokens of the fullest rank over the mean of all; 1 is balanced."""
        return max(self.tokens) * len(self.tokens) / max(sum(self.tokens), 1)

    @property
    def moved(self) -> int:
        """Tokens of examples that change their rank."""
        return sum(self.lengths[n] for rank, numbers in enumerate(self.taken) for n in numbers if self.home[n] != rank)

    def __str__(self) -> str:
        most = max((self._tokens(part) for rank in self.parts for one in rank for part in one), default=0)
        return (
            f"{len(self.lengths)} examples of {sum(self.lengths)} tokens on {len(self.parts)} data ranks: max/mean "
            f"{self.max_over_mean:.3f}, {sum(self.microbatches)} microbatches of at most {most} tokens, {self.moved} moved"
        )

    def _tokens(self, numbers: Sequence[int]) -> int:
        return sum(self.lengths[number] for number in numbers)


def balance_tokens(
    lengths: Sequence[int],
    home: Sequence[int],
    *,
    ranks: int,
    tokens_per_microbatch: int,
    microbatches: int = 1,
    minibatches: int = 1,
    minibatch_of: Sequence[int] = (),
    work: Callable[[int], float] = float,
    packed: bool = True,
    row_multiple: int = 1,
) -> Balance:
    """Share the examples of a step out over data ranks so that all have about as much work, in equally many microbatches.

    home: the data rank that has the example, which keeps it where that costs no balance.
    tokens_per_microbatch: no microbatch has more; their number is the least with which all ranks keep to that, rounded up to
    a multiple of `microbatches`.
    minibatches: optimizer steps, of which each is balanced by itself. minibatch_of: of each example, its step.
    work(tokens) is what an example costs; with attention it grows faster than its tokens. Default: its tokens.
    packed: False gives each example a part of its own; microbatches are then of some rows, as long as the longest example of
    all, rounded up to row_multiple: a microbatch has more than its tokens only where one such row has.
    Raises: DataError for an example that is longer than a microbatch.
    Source: the largest differencing method, Karmarkar & Karp 1982, over ranks and then over each rank's microbatches; where
    that leaves a microbatch too full, first-fit-decreasing.
    """
    for number, length in enumerate(lengths):
        if length > tokens_per_microbatch:
            raise DataError(
                f"example {number} takes {length} tokens, but a microbatch holds "
                f"tokens_per_microbatch={tokens_per_microbatch}. Give a larger tokens_per_microbatch, or shorter examples."
            )
    weights = [work(length) for length in lengths]
    parts: list[list[list[list[int]]]] = [[] for _ in range(ranks)]
    numbers_of_microbatches = []
    for minibatch in range(minibatches):
        numbers = [n for n in range(len(lengths)) if minibatches == 1 or minibatch_of[n] == minibatch]
        by_rank = _stay_home(_partition(numbers, weights, ranks), lengths, home)
        if packed:
            needed = max(len(_microbatches(of_rank, lengths, weights, tokens_per_microbatch)) for of_rank in by_rank)
        else:
            row = -(-max(lengths, default=1) // row_multiple) * row_multiple
            needed = -(-max(map(len, by_rank)) // max(1, tokens_per_microbatch // row))
        together = max(1, -(-needed // microbatches)) * microbatches
        numbers_of_microbatches.append(together)
        for rank, of_rank in enumerate(by_rank):
            filled = [[number] for number in of_rank]
            if packed:
                filled = _microbatches(of_rank, lengths, weights, tokens_per_microbatch, at_most=together)
            # The heaviest first on every rank: microbatches that run at the same time are alike.
            parts[rank].append(sorted(filled, key=lambda part: -sum(weights[number] for number in part)))
    return Balance(
        lengths=tuple(lengths),
        home=tuple(home),
        parts=tuple(tuple(tuple(map(tuple, minibatch)) for minibatch in of_rank) for of_rank in parts),
        microbatches=tuple(numbers_of_microbatches),
    )


def karmarkar_karp(weights: Sequence[float], parts: int) -> list[list[int]]:
    """Indices into `weights` in `parts` sets of nearly equal sums, by the largest differencing method; the same for the same.

    Each weight is a partition with one set filled. The two partitions with the widest gap between their sets are joined, the
    fullest set of one with the emptiest of the other, until one is left: O(n parts log(parts)).
    Source: Karmarkar & Karp 1982; Korf 1998 for more than two sets.
    """
    if not weights:
        return [[] for _ in range(parts)]
    # A node is the sums of its sets, largest first, less the smallest: only their differences decide. `joined` says which
    # sets of its two halves a set was made of.
    order = count()
    heap: list[tuple[float, int, _Node]] = []
    for index, weight in enumerate(weights):
        sums = np.zeros(parts)
        sums[0] = weight
        heap.append((-float(weight), next(order), _Node(sums, index)))
    heapify(heap)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heappop(heap), heappop(heap)
        sums = one.sums + other.sums[::-1]
        by_size = np.argsort(-sums, kind="stable")
        sums = sums[by_size]
        node = _Node(sums - sums[-1], -1, (one, other), by_size)
        heappush(heap, (-float(node.sums[0]), next(order), node))
    sets: list[list[int]] = [[] for _ in range(parts)]
    unfold = [(heap[0][2], np.arange(parts))]
    while unfold:
        node, to = unfold.pop()
        if node.halves is None or node.by_size is None:
            sets[int(to[0])].append(node.index)
            continue
        came_from = np.empty_like(to)
        came_from[node.by_size] = to
        unfold += [(node.halves[0], came_from), (node.halves[1], came_from[::-1])]
    return [sorted(numbers) for numbers in sets]


@dataclass(frozen=True, eq=False)
class _Node:
    sums: np.ndarray
    index: int
    halves: tuple[_Node, _Node] | None = None
    by_size: np.ndarray | None = None


def _partition(numbers: Sequence[int], weights: Sequence[float], parts: int) -> list[list[int]]:
    return [[numbers[i] for i in one] for one in karmarkar_karp([weights[n] for n in numbers], parts)]


def _stay_home(sets: list[list[int]], lengths: Sequence[int], home: Sequence[int]) -> list[list[int]]:
    """The sets in the order of ranks: which rank takes which changes no balance, so each takes one with many of its own."""
    stays = np.zeros((len(sets), len(sets)), dtype=np.int64)  # [set, rank] tokens
    for index, numbers in enumerate(sets):
        for number in numbers:
            stays[index, home[number]] += lengths[number]
    by_rank: dict[int, list[int]] = {}
    taken: set[int] = set()
    for pair in np.argsort(-stays, axis=None, kind="stable").tolist():
        index, rank = divmod(pair, len(sets))
        if index not in taken and rank not in by_rank:
            taken.add(index)
            by_rank[rank] = sets[index]
    return [by_rank[rank] for rank in range(len(sets))]


def _microbatches(
    numbers: Sequence[int], lengths: Sequence[int], weights: Sequence[float], most: int, *, at_most: int | None = None
) -> list[list[int]]:
    """Sets of about equal work and of at most `most` tokens, none empty: as few as there are, or at most `at_most`."""
    if not numbers:
        return []
    tokens = [lengths[number] for number in numbers]
    # Whatever the weights are, so many sets suffice.
    filled = first_fit_decreasing(tokens, most)
    least = -(-sum(tokens) // most)
    tries = range(least, len(filled) + 1) if at_most is None else range(at_most, least - 1, -1)
    for parts in tries:
        sets = [one for one in _partition(numbers, weights, parts) if one]
        if max(sum(lengths[number] for number in one) for one in sets) <= most:
            return sets
    return [[numbers[index] for index in one] for one in filled]
