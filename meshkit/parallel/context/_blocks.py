"""Blocks of sparse attention (striped load balancing): which rank holds which, and what the mask shows of a pair of them.

A document is cut into blocks of `block` tokens from its start, so a block is of one document, and lies on one rank whole.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshkit.core.attention_tiles import FULL, Tile, tiles
from meshkit.mask import Band, Interval, Mask
from meshkit.parallel.context._assign import Runs, intervals_of, merged
from meshkit.parallel.context._layout import Layout

Numbers = npt.NDArray[np.int64]


def cut_documents(documents: Runs, block: int) -> list[tuple[int, int, int]]:
    """(first token, after the last, document) of each block, in order."""
    return [
        (start, min(start + block, after), number)
        for number, (first, after) in enumerate(documents)
        for start in range(first, after, block)
    ]


def striped(mask: Mask, ranks: int, block: int) -> tuple[Runs, list[Runs]]:
    """(the documents that are cut into blocks, the runs of each rank).

    Blocks are dealt to the rank with the fewest tokens: of equal ones to each rank in turn, as later queries see more.
    Source: Brandon et al. 2023 (striped attention); MTraining 2025 with blocks in place of tokens.
    """
    documents = tuple(intervals_of(mask))
    holds: list[list[Interval]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for first, after, _ in cut_documents(documents, block):
        load, rank = heapq.heappop(loads)
        holds[rank].append((first, after))
        heapq.heappush(loads, (load + after - first, rank))
    return documents, [merged(each) for each in holds]


@dataclass(frozen=True)
class Blocks:
    """All blocks of a layout, in order of tokens. offset: of the first token in its owner's tensors. document: its number."""

    first: Numbers
    after: Numbers
    document: Numbers
    owner: Numbers
    offset: Numbers

    @property
    def count(self) -> int:
        return len(self.first)

    @property
    def size(self) -> Numbers:
        return self.after - self.first

    def of(self, rank: int) -> Numbers:
        """The blocks that a rank holds, in its local order."""
        return np.flatnonzero(self.owner == rank)


@lru_cache(maxsize=256)
def blocks_of(layout: Layout) -> Blocks:
    assert layout.sparse is not None
    cut = np.array(cut_documents(layout.documents, layout.sparse.block), dtype=np.int64).reshape(-1, 3)
    runs = np.array(layout.all_runs, dtype=np.int64).reshape(-1, 4)
    run = np.searchsorted(runs[:, 0], cut[:, 0], side="right") - 1  # in which the block lies
    first, after, document = cut.T
    return Blocks(first, after, document, runs[run, 2], runs[run, 3] + first - runs[run, 0])


class Kind(NamedTuple):
    """Pairs of blocks of which the same tile is visible. own: of the rank's queries, number among its blocks; other: of the
    keys, among all. tile: offsets count from the first token of each. In order of `own`."""

    tile: Tile
    own: Tensor
    other: Tensor


@dataclass(frozen=True)
class Pairs:
    """What the mask shows of a rank's blocks of queries. candidates: bool [own blocks, all blocks], of which it shows some
    pair. kinds: by the group whose keys they are."""

    candidates: Tensor
    kinds: tuple[tuple[Kind, ...], ...]


@lru_cache(maxsize=64)
def pairs_of(layout: Layout, rank: int) -> Pairs:
    """Every rank knows its own; a few operations for each band, and Python only where a pair is visible in part."""
    blocks = blocks_of(layout)
    own = blocks.of(rank)
    shown = np.zeros((len(own), blocks.count), dtype=bool)
    whole = np.zeros_like(shown)
    cut: dict[tuple[int, int], list[Band]] = {}
    for band in layout.mask.bands:
        # Blocks are in order, so those that the band meets lie together.
        rows = _meeting(blocks.first[own], blocks.after[own], band.q0, band.q1)
        columns = _meeting(blocks.first, blocks.after, band.k0, band.k1)
        q0, q1 = blocks.first[own][rows, None], blocks.after[own][rows, None]
        k0, k1 = blocks.first[None, columns], blocks.after[None, columns]
        q_first, q_after = np.maximum(q0, band.q0), np.minimum(q1, band.q1)
        k_first, k_after = np.maximum(k0, band.k0), np.minimum(k1, band.k1)
        nearest, farthest = k_after - 1 - q_first, k_first - (q_after - 1)  # key - query, at most and at least
        some = (farthest <= band.high) & (nearest >= band.low)
        every = (nearest <= band.high) & (farthest >= band.low)
        every &= (q_after - q_first == q1 - q0) & (k_after - k_first == k1 - k0)
        shown[rows, columns] |= some
        whole[rows, columns] |= every
        for row, column in zip(*np.nonzero(some & ~every), strict=True):
            at = int(row) + rows.start, int(column) + columns.start
            query, key = own[at[0]], at[1]
            clipped = band.clip(
                (int(blocks.first[query]), int(blocks.after[query])), (int(blocks.first[key]), int(blocks.after[key]))
            )
            assert clipped is not None
            cut.setdefault(at, []).append(clipped.moved(-int(blocks.first[query]), -int(blocks.first[key])))
    by_tile: dict[tuple[int, Tile], list[Numbers]] = {}
    row, column = np.nonzero(whole)
    sizes = np.stack([blocks.owner[column], blocks.size[own][row], blocks.size[column]])
    for owner, queries, keys in np.unique(sizes, axis=1).T.tolist():
        alike = (sizes == np.array([[owner], [queries], [keys]])).all(0)
        by_tile[owner, Tile(0, queries, 0, keys, FULL)] = [np.stack([row[alike], column[alike]])]
    for (row_at, column_at), bands in cut.items():
        for tile in tiles(bands):
            pair = np.array([[row_at], [column_at]])
            by_tile.setdefault((int(blocks.owner[column_at]), tile), []).append(pair)
    kinds: list[list[Kind]] = [[] for _ in range(layout.ranks)]
    for (owner, tile), parts in by_tile.items():
        pairs = np.concatenate(parts, axis=1)
        pairs = pairs[:, np.lexsort(pairs[::-1])]
        kinds[owner].append(Kind(tile, torch.from_numpy(pairs[0].copy()), torch.from_numpy(pairs[1].copy())))
    return Pairs(torch.from_numpy(shown), tuple(map(tuple, kinds)))


def _meeting(first: Numbers, after: Numbers, begin: int, end: int) -> slice:
    return slice(int(np.searchsorted(after, begin, side="right")), int(np.searchsorted(first, end, side="left")))


def places_sent(layout: Layout, owner: int, receiver: int, needed: Tensor) -> Tensor:
    """Where the keys that one rank sends another lie in the owner's tensor [B, T, K], flat. needed: [P, B, K, N]."""
    blocks, mine = blocks_of(layout), blocks_of(layout).of(owner)
    of_block = needed[receiver][..., torch.from_numpy(mine)]
    # The owner's blocks are in the order of its tokens, without gaps.
    of_token = of_block.repeat_interleave(torch.from_numpy(blocks.size[mine]), dim=2).transpose(1, 2)
    row, token, head = of_token.nonzero(as_tuple=True)
    return (row * layout.lengths[owner] + token) * needed.shape[2] + head
