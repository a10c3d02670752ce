"""Orders of a cluster's unlike blocks, nodes kept whole: all of them where they are few, else by annealing and swaps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product
from math import exp, factorial

import numpy as np

from meshkit.cluster import Cluster, Unlike
from meshkit.errors import PlanError

MOST = factorial(8)  # orders that are all looked at
WALKS, MOVES, HOT, COLD = 4, 3000, 0.1, 1e-4  # temperatures are shares of the least seconds of the walk so far
Order = tuple[int, ...]
"""the block that sits in place 0, in place 1, ..."""
Orderings = np.ndarray
"""(orders, places): a row for each"""
Seen = np.ndarray
"""(orders, numbers)"""


@dataclass(frozen=True)
class Orders:
    """count: blocks of `each` ranks. inside: those of a node, which stay together. racks: blocks of each tier between."""

    unlike: Unlike
    count: int
    inside: int
    racks: tuple[int, ...] = ()

    @staticmethod
    def of(cluster: Cluster, world: int) -> Orders:
        """Of the cluster's first ranks. Raises: PlanError where the world is a part of a block or node."""
        unlike = cluster.unlike
        assert unlike is not None
        node = cluster.tiers[0].ranks if len(cluster.tiers) > 1 else world
        if world > cluster.ranks or world % unlike.each or (node > unlike.each and world % node):
            raise PlanError(
                f"place: a world of {world} ranks on cluster {cluster.name!r}, whose {cluster.ranks} ranks are blocks of "
                f"{max(unlike.each, min(node, world))}. Give a world of whole blocks."
            )
        # Where no table says what links there are, the tiers do, and blocks of two racks are no twins.
        racks = () if unlike.bytes_per_s else tuple(tier.ranks // unlike.each for tier in cluster.tiers[:-1])
        inside = max(1, min(node, world) // unlike.each)
        return Orders(unlike, world // unlike.each, inside, tuple(each for each in racks if each > 1))

    @property
    def total(self) -> int:
        return int(factorial(self.count // self.inside) * factorial(self.inside) ** (self.count // self.inside))

    @property
    def is_exact(self) -> bool:
        return self.total <= MOST

    def ranks(self, order: Order) -> tuple[int, ...]:
        """The placement: which rank of the cluster each rank of the mesh is; () where each is itself."""
        each = self.unlike.each
        ranks = tuple(block * each + at for block in order for at in range(each))
        return () if ranks == tuple(range(len(ranks))) else ranks

    def all(self) -> Iterator[Order]:
        """Without those that only exchange blocks that nothing tells apart."""
        nodes = [range(first, first + self.inside) for first in range(0, self.count, self.inside)]
        twins = self._twins()
        for chosen in permutations(nodes):
            for insides in product(*(permutations(node) for node in chosen)):
                order = tuple(block for inside in insides for block in inside)
                if self.inside > 1 < len(nodes) or _in_order(order, twins):
                    yield order

    def _twins(self) -> list[list[int]]:
        """Classes of blocks of the same devices and the same links."""
        classes: list[list[int]] = []
        for block in range(self.count):
            known = next((each for each in classes if self._alike(each[0], block)), None)
            if known is None:
                classes.append([block])
            else:
                known.append(block)
        return [each for each in classes if len(each) > 1]

    def _alike(self, one: int, other: int) -> bool:
        unlike = self.unlike
        if any(one // rack != other // rack for rack in self.racks):
            return False
        if any(of_blocks[one] != of_blocks[other] for of_blocks in (unlike.speed, unlike.memory_bytes) if of_blocks):
            return False
        rest = [block for block in range(self.count) if block not in (one, other)]
        return all(
            matrix[one][other] == matrix[other][one]
            and all(
                matrix[one][each] == matrix[other][each] and matrix[each][one] == matrix[each][other] for each in rest
            )
            for matrix in (unlike.bytes_per_s, unlike.latency_s)
            if matrix
        )

    def swaps(self) -> list[tuple[slice, slice]]:
        """What may change places: blocks of one node, and nodes."""
        nodes = [slice(first, first + self.inside) for first in range(0, self.count, self.inside)]
        pairs = list(combinations(nodes, 2))
        for node in nodes if self.inside > 1 else []:
            blocks = [slice(at, at + 1) for at in range(node.start, node.stop)]
            pairs += combinations(blocks, 2)
        return pairs

    def best(self, seen: Callable[[Orderings], Seen], seconds: Callable[[Order], float]) -> Order:
        """The order of least seconds, exact where `is_exact`; of those that are as fast the first, as blocks sit already.

        seen: all that seconds depend on, a row for each order; of orders with equal rows one is asked for its seconds.
        """
        given, known = tuple(range(self.count)), dict[bytes, float]()

        def asked(order: Order, row: np.ndarray) -> float:
            key = row.tobytes()
            if key not in known:
                known[key] = seconds(order)
            return known[key]

        def of(order: Order) -> float:
            return asked(order, seen(np.array([order]))[0])

        best, least = given, of(given)
        if not self.is_exact:
            return self._walked(given, least, of)
        orders = np.array(list(self.all()))
        rows = seen(orders)
        _, firsts = np.unique(rows, axis=0, return_index=True)
        for first in sorted(firsts.tolist()):
            order = tuple(orders[first].tolist())
            if (found := asked(order, rows[first])) < least * (1 - 1e-9):
                best, least = order, found
        return best

    def _walked(self, given: Order, least: float, seconds: Callable[[Order], float]) -> Order:
        """Walks that take worse orders less and less (Kirkpatrick 1983), from orders drawn at random; from where each came to
        its least, only what is better."""
        draw, pairs, best = random.Random(0), self.swaps(), given
        for walk in range(WALKS):
            order = given
            for _ in range(len(pairs) if walk else 0):
                order = _swapped(order, *draw.choice(pairs))
            now = lowest_s = seconds(order)
            lowest = order
            for move in range(MOVES):
                heat = lowest_s * HOT * (COLD / HOT) ** (move / MOVES)
                other = _swapped(order, *draw.choice(pairs))
                took = seconds(other)
                if took <= now or draw.random() < exp((now - took) / heat):
                    order, now = other, took
                if now < lowest_s * (1 - 1e-9):
                    lowest, lowest_s = order, now
            while True:
                others = [_swapped(lowest, *pair) for pair in pairs]
                nearest = min(others, key=seconds)
                if seconds(nearest) >= lowest_s * (1 - 1e-9):
                    break
                lowest, lowest_s = nearest, seconds(nearest)
            if lowest_s < least * (1 - 1e-9):
                best, least = lowest, lowest_s
        return best


def _in_order(order: Order, twins: Sequence[Sequence[int]]) -> bool:
    places = {block: place for place, block in enumerate(order)}
    return all(places[one] < places[other] for each in twins for one, other in pairwise(each))


def _swapped(order: Order, one: slice, other: slice) -> Order:
    changed = list(order)
    changed[one], changed[other] = order[other], order[one]
    return tuple(changed)
