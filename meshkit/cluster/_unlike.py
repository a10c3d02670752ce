"""Unlike links and nodes (heterogeneous cluster): blocks of ranks that are slower than the cluster's device and tiers say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshkit.errors import ClusterError

LEAST_SPEED = 0.001
Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Link:
    """The slowest of some: bytes a second one way, and seconds of a hop."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class Unlike:
    """Blocks of `each` consecutive ranks, as nodes, whose devices or links are less than the cluster says.

    speed: of each block's devices, a share of `device`'s in all that it computes; empty, all of it. memory_bytes: of a device
    of each block; empty, `device`'s. bytes_per_s, latency_s: of a message from block i (the row) to block j, in place of the
    tiers between them; the diagonal is not read. Empty, as the tiers say. What ranks of a block share of a tier's link they
    share of these too.
    Raises: ClusterError for tables of another size than the blocks, and for numbers that no machine has.
    """

    each: int = 1
    speed: tuple[float, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    bytes_per_s: Matrix = ()
    latency_s: Matrix = ()

    def __post_init__(self) -> None:
        try:
            for name in ("speed", "memory_bytes"):
                object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
            for name in ("bytes_per_s", "latency_s"):
                object.__setattr__(self, name, tuple(tuple(map(float, row)) for row in getattr(self, name)))
        except TypeError:
            raise ClusterError(
                "unlike: speed and memory_bytes are a number for each block, bytes_per_s and latency_s a row of numbers for "
                "each."
            ) from None
        if type(self.each) is not int or self.each < 1:
            raise ClusterError(f"unlike.each={self.each!r}: ranks of a block, at least 1.")
        if not all(LEAST_SPEED <= speed <= 1 for speed in self.speed):
            raise ClusterError(
                f"unlike.speed={self.speed!r}: shares of the device's speed, at least {LEAST_SPEED} and at most 1."
            )
        if not all(size >= 1 for size in self.memory_bytes):
            raise ClusterError(
                f"unlike.memory_bytes={self.memory_bytes!r}: bytes of a device of each block, at least 1."
            )
        for name, matrix, least in (
            ("bytes_per_s", self.bytes_per_s, "at least 1"),
            ("latency_s", self.latency_s, "at least 0"),
        ):
            if any(len(row) != len(matrix) for row in matrix):
                raise ClusterError(
                    f"unlike.{name} has {len(matrix)} rows, but not as many numbers in each. Give a square."
                )
            off = [value for i, row in enumerate(matrix) for j, value in enumerate(row) if i != j]
            if not all(value >= (1 if name == "bytes_per_s" else 0) for value in off):
                raise ClusterError(f"unlike.{name}: from one block to another numbers are {least}.")
        if len(self.bytes_per_s) != len(self.latency_s):
            raise ClusterError("unlike: bytes_per_s and latency_s belong together. Give both, or neither.")
        if not self.blocks:
            raise ClusterError(
                "unlike says nothing. Give speed, memory_bytes, or bytes_per_s and latency_s, or leave it away."
            )
        counts = {
            name: len(getattr(self, name)) for name in ("speed", "memory_bytes", "bytes_per_s") if getattr(self, name)
        }
        if len(set(counts.values())) > 1:
            said = ", ".join(f"{name} is of {count} blocks" for name, count in counts.items())
            raise ClusterError(f"unlike: {said}. Give each block once.")

    @property
    def blocks(self) -> int:
        return len(self.speed) or len(self.memory_bytes) or len(self.bytes_per_s)

    @property
    def ranks(self) -> int:
        return self.blocks * self.each

    def speed_of(self, ranks: Sequence[int]) -> float:
        """Of the slowest of them."""
        return self._least(self.speed, ranks, 1.0)

    def memory_of(self, ranks: Sequence[int]) -> float:
        """Bytes of a device, of the one of them that has least; infinite where the cluster's device says it."""
        return self._least(self.memory_bytes, ranks, math.inf)

    def _least(self, of_blocks: Sequence[float], ranks: Sequence[int], alike: float) -> float:
        blocks = {rank // self.each for rank in ranks}
        return min((of_blocks[block] for block in blocks), default=alike) if of_blocks else alike

    def ring(self, groups: Sequence[Sequence[int]]) -> Link | None:
        """The slowest link of rings through groups of ranks, in their order; None where none leaves its block."""
        return self.slowest({pair for group in groups for pair in zip(group, [*group[1:], group[0]], strict=True)})

    def mutual(self, groups: Sequence[Sequence[int]]) -> Link | None:
        """The slowest link between any two of a group."""
        blocks = [{rank // self.each for rank in group} for group in groups]
        return self.slowest({(i * self.each, j * self.each) for group in blocks for i in group for j in group})

    def link(self, blocks: tuple[int, int]) -> Link | None:
        """From one block to another."""
        one, other = (block * self.each for block in blocks)
        return self.slowest({(one, other)})

    def slowest(self, pairs: set[tuple[int, int]]) -> Link | None:
        """Of links between ranks; None where the tiers say what these are."""
        if not self.bytes_per_s:
            return None
        crossed = {(one // self.each, other // self.each) for one, other in pairs}
        crossed = {(i, j) for i, j in crossed if i != j}
        if not crossed:
            return None
        return Link(min(self.bytes_per_s[i][j] for i, j in crossed), max(self.latency_s[i][j] for i, j in crossed))
