"""From chosen blocks to kernel calls: tiles of one shape, of any row and head, without a wait for how many there are.

[Note: tiles by counting]
How many pairs of blocks each block of queries chose is a matter of values, and sizes of tensors are the host's. So the
device counts, for each kind of tile, how many blocks of queries have one pair of it, two, three, ...; the host reads these
few numbers once a layer, and all indices are then made on the device, in tensors of known sizes. Backward gets them too.
Dims: B batch, H query heads, Q own blocks, N all blocks, P pairs, G groups of them: one block of queries, one kind of tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from meshkit.core.attention_tiles import FULL, HeadTiles, Tile
from meshkit.core.to_device import to_device
from meshkit.parallel.context._blocks import blocks_of, pairs_of
from meshkit.parallel.context._layout import Layout


@dataclass(frozen=True)
class TileTable:
    """What the mask shows of a rank's blocks of queries, kind after kind. kinds: (owner of the keys, tile). own, other: [P],
    blocks of queries (of this rank) and of keys (of all). start, end: [G], of a group's pairs. kind: [G], its number.
    groups: of each kind, the first and the one after the last. q0: [G], k0: [P], places of first tokens. most: pairs of a
    group. candidates: bool [Q, N], of which the mask shows some pair."""

    kinds: tuple[tuple[int, Tile], ...]
    groups: tuple[tuple[int, int], ...]
    most: int
    own: Tensor
    other: Tensor
    start: Tensor
    end: Tensor
    kind: Tensor
    q0: Tensor
    k0: Tensor
    candidates: Tensor


@lru_cache(maxsize=64)
def tile_table(layout: Layout, rank: int, device: torch.device) -> TileTable:
    """On the device, for all layers of a batch."""
    blocks = blocks_of(layout)
    offset, own_offset = (torch.from_numpy(each) for each in (blocks.offset, blocks.offset[blocks.of(rank)]))
    pairs = pairs_of(layout, rank)
    kinds = [(owner, kind) for owner, of in enumerate(pairs.kinds) for kind in of]
    none = torch.empty(0, dtype=torch.int64)
    own, other, sizes, q0, k0, counts = [none], [none], [none], [none], [none], list[int]()
    for _, kind in kinds:
        queries, of_each = kind.own.unique_consecutive(return_counts=True)
        own.append(kind.own)
        other.append(kind.other)
        sizes.append(of_each)
        q0.append(own_offset[queries] + kind.tile.q0)
        k0.append(offset[kind.other] + kind.tile.k0)
        counts.append(len(queries))
    size, edges = torch.cat(sizes), list(accumulate(counts, initial=0))
    end = size.cumsum(0)
    numbers = torch.arange(len(kinds)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    tensors = (
        torch.cat(own),
        torch.cat(other),
        end - size,
        end,
        numbers,
        torch.cat(q0),
        torch.cat(k0),
        pairs.candidates,
    )
    return TileTable(
        tuple((owner, kind.tile) for owner, kind in kinds),
        tuple(pairwise(edges)),
        int(size.max()) if len(size) else 0,
        *(to_device(tensor, device) for tensor in tensors),
    )


def count_tiles(chosen: Tensor, table: TileTable) -> Tensor:
    """[kinds, most + 1]: how many groups, of all rows and heads, have so many chosen pairs. chosen: bool [B, H, Q, N]."""
    counts = _counts(chosen, table)
    of_kinds = torch.zeros(len(table.kinds) * (table.most + 1), dtype=torch.int64, device=chosen.device)
    places = (table.kind * (table.most + 1) + counts).flatten()
    return of_kinds.index_add_(0, places, torch.ones_like(places)).view(len(table.kinds), table.most + 1)


def visible_in(counted: Tensor, table: TileTable) -> int:
    """Visible pairs of query and key."""
    pairs = (counted * torch.arange(table.most + 1)).sum(1).tolist()
    return sum(tile.area * count for (_, tile), count in zip(table.kinds, pairs, strict=True))


def head_tiles(chosen: Tensor, counted: Tensor, table: TileTable) -> dict[int, list[HeadTiles]]:
    """The kernel calls by the rank whose keys they are. counted: of `count_tiles`, on the host."""
    found: dict[int, list[HeadTiles]] = {}
    counts = _counts(chosen, table)
    total = int((counted * torch.arange(table.most + 1)).sum())
    # Pairs that are chosen, in the order of rows, heads and groups, so that those of a group follow each other.
    pair = torch.nonzero_static(chosen[:, :, table.own, table.other], size=total)[:, 2]
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)
    for number, (owner, tile) in enumerate(table.kinds):
        groups = slice(*table.groups[number])
        for count, times in enumerate(counted[number].tolist()):
            if not count or not times:
                continue
            row, head, group = torch.nonzero_static(counts[:, :, groups] == count, size=times).unbind(1)
            first = starts[:, :, groups][row, head, group]
            k0 = table.k0[pair[first.unsqueeze(1) + torch.arange(count, device=chosen.device)]]
            # Of pairs that are visible whole, one call has all keys; of others a call has one.
            for piece in [k0] if tile.kind == FULL else k0.split(1, dim=1):
                q0, size = table.q0[groups][group], (tile.q1 - tile.q0, tile.k1 - tile.k0)
                found.setdefault(owner, []).append(HeadTiles(row, head, q0, piece, *size, tile.kind))
    return found


def _counts(chosen: Tensor, table: TileTable) -> Tensor:
    """[B, H, G]: chosen pairs of each group."""
    before = F.pad(chosen[:, :, table.own, table.other].cumsum(-1, dtype=torch.int32), (1, 0))
    return (before[..., table.end] - before[..., table.start]).long()
