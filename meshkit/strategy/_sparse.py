"""Choices of sparse attention: block top-k (MoBA) and vertical-slash (MInference), at run time from queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

from meshkit.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class BlockTopK:
    """Each block of queries sees the `top` blocks of keys whose means its mean scores highest, its own among them.

    block: tokens of a block; documents are cut into blocks from their start, and the last may be shorter. Each query head
    chooses for itself. Source: Lu et al. 2025 (MoBA), with the queries of a block taken together, as in MInference.
    """

    block: int
    top: int

    def __post_init__(self) -> None:
        _refuse_odd_sizes(self)

    def most_blocks(self, before: int) -> int:
        """The most blocks of keys that a block of queries sees where the mask shows it `before` of them."""
        return min(self.top, before)


@dataclass(frozen=True, kw_only=True)
class VerticalSlash:
    """Queries see `vertical` columns and `slash` diagonals of blocks, those with most of the attention of the last queries.

    The first column and the main diagonal, in which a query sees itself, are always among them. block: tokens of a block;
    documents are cut into blocks from their start, and the last may be shorter. queries: the last ones of each document:
    their attention to all of it is computed in order to choose. Each query head chooses for itself, for each document.
    Source: Jiang et al. 2024 (MInference), with blocks in place of single columns; MTraining 2025 trains with it.
    """

    block: int
    vertical: int
    slash: int
    queries: int = 64

    def __post_init__(self) -> None:
        _refuse_odd_sizes(self)

    def most_blocks(self, before: int) -> int:
        """The most blocks of keys that a block of queries sees where the mask shows it `before` of them."""
        return min(self.vertical + self.slash, before)


Sparse = BlockTopK | VerticalSlash


def visible_pairs(sparse: Sparse, length: int) -> int:
    """The most pairs of query and key that a head sees of one causal document: exact for `BlockTopK`."""
    blocks, rest = divmod(length, sparse.block)
    pairs = 0
    for index, size in enumerate([sparse.block] * blocks + [rest] * bool(rest)):
        pairs += size * (size + 1) // 2 + (sparse.most_blocks(index + 1) - 1) * sparse.block * size
    return pairs


def _refuse_odd_sizes(sparse: Sparse) -> None:
    for name, value in vars(sparse).items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"{type(sparse).__name__}: {name}={value!r} must be a whole number of at least 1.")
