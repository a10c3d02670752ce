"""Which blocks of keys sparse attention sees, chosen at run time from queries and keys: block top-k and vertical-slash.

Each rank chooses for its own blocks of queries, so no two ranks can choose differently, and tells the others which keys it
needs. No gradient goes through the choice.
Dims: B batch, T tokens of this rank, H query heads, K key/value heads, G = H/K, D head_dim, Q own blocks, N all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from meshkit.core import _torch
from meshkit.core.attention_kernels import accumulator_dtype
from meshkit.core.to_device import HOST, to_device
from meshkit.mask import Mask
from meshkit.parallel.context._blocks import Numbers, blocks_of, pairs_of
from meshkit.parallel.context._head_tiles import count_tiles, tile_table
from meshkit.parallel.context._layout import Layout
from meshkit.parallel.context._ring_group import RingGroup
from meshkit.strategy import BlockTopK, VerticalSlash


def choose_blocks(q: Tensor, k: Tensor, layout: Layout, ring: RingGroup, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(chosen [B, H, Q, N] of this rank's queries, needed [P, B, K, N] of each of the P ranks and what `count_tiles` counts,
    both on the host).

    Wire: what the choice takes, and an all-gather of one byte for each row, key/value head and block. The host waits once.
    """
    rows, heads, kv_heads = len(q), q.shape[2], k.shape[2]
    table = tile_table(layout, ring.rank, HOST if _torch.is_fake(q) else q.device)
    if _torch.is_fake(q):  # in estimates: as many blocks as can be, the nearest ones
        of_ranks = [_nearest(layout, rank) for rank in range(layout.ranks)]
        chosen = of_ranks[ring.rank].expand(rows, heads, -1, -1)
        needed = torch.stack([of_rank.any(0) for of_rank in of_ranks])[:, None, None].expand(-1, rows, kv_heads, -1)
        return chosen, needed, count_tiles(chosen, table)
    if isinstance(layout.sparse, BlockTopK):
        chosen = _by_means(q, k, table.candidates, layout.sparse.top, layout, ring)
    else:
        assert isinstance(layout.sparse, VerticalSlash)
        chosen = _by_last_queries(q, k, table.candidates, layout.sparse, layout, ring, scale)
    needed = rearrange(chosen, "b (k g) q n -> b k (g q) n", k=kv_heads).any(2).byte()
    needed = rearrange(_gathered(needed, ring), "(p b) k n -> p b k n", b=rows)
    counted = count_tiles(chosen, table)
    # In one copy, so that the host waits once.
    numbers = torch.cat([counted.view(torch.uint8).flatten(), needed.flatten()]).cpu()
    of_tiles, of_needed = numbers.split([counted.numel() * counted.itemsize, needed.numel()])
    return chosen, of_needed.view(needed.shape).bool(), of_tiles.clone().view(torch.int64).view(counted.shape)


def _nearest(layout: Layout, rank: int) -> Tensor:
    """[Q, N]"""
    assert layout.sparse is not None
    candidates, own = pairs_of(layout, rank).candidates, blocks_of(layout).of(rank)
    kept = np.zeros(candidates.shape, dtype=bool)
    for row, block in enumerate(own):
        shown = np.flatnonzero(candidates[row])
        kept[row, shown[np.abs(shown - block).argsort(kind="stable")[: layout.sparse.most_blocks(len(shown))]]] = True
    return torch.from_numpy(kept)


def _top(scores_BHQN: Tensor, candidates_QN: Tensor, layout: Layout, rank: int, top: int) -> Tensor:
    """The `top` candidates of the highest scores, the block of the queries itself first."""
    own = to_device(torch.from_numpy(blocks_of(layout).of(rank)), scores_BHQN.device)
    scores = scores_BHQN.scatter(-1, own.view(1, 1, -1, 1).expand(*scores_BHQN.shape[:3], 1), float("inf"))
    scores = scores.masked_fill(~candidates_QN, float("-inf"))
    best = scores.topk(min(top, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & candidates_QN


# ----------------------------------------------------------------------------------------------------- block top-k


def _by_means(q: Tensor, k: Tensor, candidates: Tensor, top: int, layout: Layout, ring: RingGroup) -> Tensor:
    """Wire: an all-gather of the means of all blocks of keys, in the accumulator's dtype."""
    queries, own_keys = (_means(each, layout, ring.rank) for each in (q, k))
    keys = _of_all_blocks(own_keys, layout, ring)
    queries = rearrange(queries, "b q (k g) d -> b k g q d", k=k.shape[2])
    scores = queries @ rearrange(keys, "b n k d -> b k 1 d n")
    return _top(rearrange(scores, "b k g q n -> b (k g) q n"), candidates, layout, ring.rank, top)


def _means(x_BTHD: Tensor, layout: Layout, rank: int) -> Tensor:
    """[B, Q, H, D], in the accumulator's dtype."""
    blocks = blocks_of(layout)
    own = blocks.of(rank)
    sizes = to_device(torch.from_numpy(blocks.size[own]), x_BTHD.device)
    means: Tensor = _sums(x_BTHD, 1, blocks.offset[own], blocks.size[own]) / sizes.view(1, -1, 1, 1)
    return means


def _sums(x: Tensor, dim: int, first: Numbers, size: Numbers) -> Tensor:
    """Sums along a dim over intervals that follow each other, in the accumulator's dtype."""
    parts = []
    # Equal intervals in a row are one sum over a view: of a long document all but the last.
    for run in np.split(np.arange(len(size)), np.flatnonzero(np.diff(size)) + 1):
        count, each = len(run), int(size[run[0]]) if len(run) else 0
        view = x.narrow(dim, int(first[run[0]]) if count else 0, count * each).unflatten(dim, (count, each))
        parts.append(view.sum(dim + 1, dtype=accumulator_dtype(x.dtype)))
    return torch.cat(parts, dim)


def _of_all_blocks(own: Tensor, layout: Layout, ring: RingGroup) -> Tensor:
    """[B, Q, ...] of every rank's blocks as [B, N, ...]."""
    blocks = blocks_of(layout)
    most = most_blocks(layout)
    shard = own.new_zeros((own.shape[0], most, *own.shape[2:]))
    shard[:, : own.shape[1]] = own
    by_rank = rearrange(_gathered(shard, ring), "(p b) q ... -> b (p q) ...", b=len(own))
    number = np.zeros(blocks.count, dtype=np.int64)  # of each among its owner's
    for rank in range(layout.ranks):
        mine = blocks.of(rank)
        number[mine] = np.arange(len(mine))
    return by_rank.index_select(1, to_device(torch.from_numpy(blocks.owner * most + number), own.device))


def most_blocks(layout: Layout) -> int:
    """Of a rank: messages of all ranks are as long."""
    return int(np.bincount(blocks_of(layout).owner, minlength=layout.ranks).max())


def _gathered(x: Tensor, ring: RingGroup) -> Tensor:
    """Of all ranks, one after the other."""
    if ring.groups == 1:
        return x
    gathered = x.new_empty((ring.groups * len(x), *x.shape[1:]))
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=ring.process_group)
    return gathered


def _summed(x: Tensor, ring: RingGroup) -> Tensor:
    if ring.groups > 1:
        dist.all_reduce(x, group=ring.process_group)
    return x


# --------------------------------------------------------------------------------------------------- vertical-slash


@dataclass(frozen=True)
class Document:
    """One that has more blocks than are surely seen. base: its first block; blocks: how many. queries: its last tokens.
    at: where these lie among those of all such documents."""

    base: int
    blocks: int
    queries: range
    at: int


@lru_cache(maxsize=256)
def long_documents(layout: Layout) -> tuple[Document, ...]:
    sparse = layout.sparse
    assert isinstance(sparse, VerticalSlash)
    found, base, at = list[Document](), 0, 0
    for first, after in layout.documents:
        count = -(-(after - first) // sparse.block)
        if count > max(sparse.vertical, sparse.slash):
            queries = range(max(first, after - sparse.queries), after)
            found.append(Document(base, count, queries, at))
            at += len(queries)
        base += count
    return tuple(found)


def _by_last_queries(
    q: Tensor,
    k: Tensor,
    candidates: Tensor,
    sparse: VerticalSlash,
    layout: Layout,
    ring: RingGroup,
    scale: float,
) -> Tensor:
    """Wire: all-reduces of the last queries of long documents, and of the attention to each column and diagonal; an
    all-gather of the sums of their softmax."""
    documents, blocks = long_documents(layout), blocks_of(layout)
    shape = (len(q), q.shape[2], blocks.count)
    columns, diagonals = (torch.ones(shape, dtype=torch.bool, device=q.device) for _ in range(2))
    if documents:
        mass = _attention_of_blocks(q, k, documents, layout, ring, scale)
        for document in documents:
            of = slice(document.base, document.base + document.blocks)
            for seen, each, most in zip(
                (columns, diagonals), mass.unbind(2), (sparse.vertical, sparse.slash), strict=True
            ):
                scores = each[..., of].clone()
                scores[..., 0] = float("inf")
                best = scores.topk(min(most, document.blocks), dim=-1).indices
                seen[..., of] = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    own = blocks.of(ring.rank)
    bases = np.searchsorted(blocks.document, blocks.document[own], side="left")  # of each own block's document
    distance = np.minimum(bases[:, None] + np.abs(own[:, None] - np.arange(blocks.count)), blocks.count - 1)
    on_diagonal = diagonals[..., to_device(torch.from_numpy(distance), q.device)]
    return (columns.unsqueeze(2) | on_diagonal) & candidates


def _attention_of_blocks(
    q: Tensor, k: Tensor, documents: tuple[Document, ...], layout: Layout, ring: RingGroup, scale: float
) -> Tensor:
    """[B, H, 2, N]: what the last queries of each document attend to each of its blocks, and to each distance in blocks."""
    blocks, dtype = blocks_of(layout), accumulator_dtype(q.dtype)
    count = documents[-1].at + len(documents[-1].queries)
    last = q.new_zeros((len(q), count, *q.shape[2:]))
    for document in documents:
        places, at = _own_queries(document, layout, ring.rank)
        last.index_copy_(1, to_device(at, q.device), q.index_select(1, to_device(places, q.device)))
    last = _summed(last, ring)
    sums = torch.full((len(q), q.shape[2], count), float("-inf"), dtype=dtype, device=q.device)
    for heads, document, scores, _ in _scores(last, k, documents, layout, ring.rank, scale):
        sums[:, heads, document.at : document.at + len(document.queries)] = scores.logsumexp(-1)
    sums = rearrange(_gathered(sums, ring), "(p b) h s -> p b h s", b=len(q)).logsumexp(0)
    mass = torch.zeros((len(q), q.shape[2], 2, blocks.count), dtype=dtype, device=q.device)
    for heads, document, scores, own in _scores(last, k, documents, layout, ring.rank, scale):
        of = slice(document.at, document.at + len(document.queries))
        # A query that sees nothing has sums of -inf, and no weight.
        p = (scores - sums[:, heads, of].unsqueeze(-1)).exp().nan_to_num(0.0)
        first = blocks.offset[own] - blocks.offset[own[0]]
        of_block = _sums(p, 3, first, blocks.size[own])
        numbers = to_device(torch.from_numpy(own), q.device)
        mass[:, heads, 0].index_add_(2, numbers, of_block.sum(2))
        rows = _blocks_of_queries(document, layout)
        for row in range(int(rows[0]), int(rows[-1]) + 1):
            of_row = of_block[:, :, slice(*np.searchsorted(rows, [row, row + 1]).tolist())].sum(2)
            mass[:, heads, 1].index_add_(2, document.base + (numbers - row).abs(), of_row)
    return _summed(mass, ring)


def _blocks_of_queries(document: Document, layout: Layout) -> Numbers:
    """The block of each of its last queries."""
    return np.searchsorted(blocks_of(layout).first, np.array(document.queries), side="right") - 1


def _own_queries(document: Document, layout: Layout, rank: int) -> tuple[Tensor, Tensor]:
    """Of those that this rank holds: their places on it, and their places among the last queries of all documents."""
    blocks, holders = blocks_of(layout), _blocks_of_queries(document, layout)
    mine = blocks.owner[holders] == rank
    places = blocks.offset[holders] + np.array(document.queries) - blocks.first[holders]
    return torch.from_numpy(places[mine]), torch.from_numpy(document.at + np.flatnonzero(mine))


def _scores(
    last: Tensor, k: Tensor, documents: tuple[Document, ...], layout: Layout, rank: int, scale: float
) -> Iterator[tuple[slice, Document, Tensor, Numbers]]:
    """(query heads, document, [B, heads, S, own tokens] with -inf where the mask hides, own blocks) of a key/value head."""
    blocks, group, dtype = blocks_of(layout), last.shape[2] // k.shape[2], accumulator_dtype(k.dtype)
    mine = blocks.of(rank)
    for document in documents:
        own = mine[(mine >= document.base) & (mine < document.base + document.blocks)]
        if not len(own):
            continue
        start, stop = int(blocks.offset[own[0]]), int(blocks.offset[own[-1]] + blocks.size[own[-1]])
        visible = _shown(layout, document, tuple(own.tolist()), k.device)
        queries = last[:, document.at : document.at + len(document.queries)]
        for head in range(k.shape[2]):
            heads = slice(head * group, (head + 1) * group)
            products = torch.einsum("bshd,btd->bhst", queries[:, :, heads], k[:, start:stop, head]).to(dtype)
            yield heads, document, (products * scale).masked_fill(~visible, float("-inf")), own


@lru_cache(maxsize=64)
def _shown(layout: Layout, document: Document, blocks: tuple[int, ...], device: torch.device) -> Tensor:
    """Whether each of the document's last queries sees each key of these blocks."""
    mask, edges = layout.mask, blocks_of(layout)
    keys = torch.cat([torch.arange(int(edges.first[block]), int(edges.after[block])) for block in blocks])
    queries = torch.arange(document.queries.start, document.queries.stop)
    bands = tuple(band for band in mask.bands if band.q0 < document.queries.stop and band.q1 > document.queries.start)
    return to_device(Mask(mask.tokens, bands).shows(queries.unsqueeze(1), keys), device)
