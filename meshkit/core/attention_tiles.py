"""Attention tiles: the bands of a mask cut into rectangles that one flash attention kernel call computes each.

| tile   | what the kernel computes                                                       |
|--------|--------------------------------------------------------------------------------|
| FULL   | every query sees every key                                                     |
| CAUSAL | a square: query i sees keys 0..i                                               |
| ANTI   | a square: query i sees keys i..n-1, which is CAUSAL with both orders reversed  |

Every query of a tile sees at least one key of it, so what kernels return for rows without keys never matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from meshkit.mask import FAR, Band

FULL, CAUSAL, ANTI = 0, 1, 2


class Tile(NamedTuple):
    """Queries [q0, q1) and keys [k0, k1), as offsets in the tensors of the kernel call."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: int = FULL

    @property
    def area(self) -> int:
        """Visible pairs."""
        rows, keys = self.q1 - self.q0, self.k1 - self.k0
        return rows * keys if self.kind == FULL else rows * (rows + 1) // 2


class HeadTiles(NamedTuple):
    """Tiles of one shape and kind, each of a row of the batch and a query head of its own: one kernel call.

    rows, heads, q0: [N]. k0: [N, J], first of the tile's pieces of `keys` keys; only FULL tiles have several. No two tiles
    have the same queries.
    """

    rows: Tensor
    heads: Tensor
    q0: Tensor
    k0: Tensor
    queries: int
    keys: int
    kind: int = FULL


def tiles(bands: Iterable[Band]) -> list[Tile]:
    """The kernel calls of disjoint bands, in order of their keys, neighbours joined where one call can do both."""
    tiles_of_bands = [tile for band in bands for tile in _tiles_of(band)]
    return sorted(_join_causal(_join_full(tiles_of_bands)), key=lambda tile: (tile.k0, tile.q0))


def _tiles_of(band: Band) -> Iterator[Tile]:
    clipped = band.clip((band.q0, band.q1), (band.k0, band.k1))
    if clipped is None:
        return
    q0, q1, k0, k1, low, high = clipped
    if low == -FAR and high == FAR:
        yield Tile(q0, q1, k0, k1)
    elif low == -FAR:
        # Row q0 sees up to key `first`; each further row sees one more, until the keys end.
        first = q0 + high
        rows = min(q1 - q0, k1 - first)
        yield from _rectangle(q0, q1, k0, first)
        yield Tile(q0, q0 + rows, first, first + rows, CAUSAL)
        yield from _rectangle(q0 + rows, q1, first, k1)
    elif high == FAR:
        # The last row sees from key `first` on; each row before it sees one more, until the keys begin.
        first = q1 - 1 + low
        rows = min(q1 - q0, first + 1 - k0)
        yield from _rectangle(q0, q1, first + 1, k1)
        yield Tile(q1 - rows, q1, first + 1 - rows, first + 1, ANTI)
        yield from _rectangle(q0, q1 - rows, k0, first + 1)
    else:
        # As many rows as the window is wide share the key `a + high`: before it only `low` binds, after it only `high`.
        width = high - low + 1
        # Each half has one bound, so it is a triangle and rectangles: a window costs about two tiles for each `width` rows.
        for a in range(q0, q1, width):
            rows_of = (a, min(a + width, q1))
            for keys in ((k0, a + high), (a + high, k1)):
                half = clipped.clip(rows_of, keys)
                if half is not None:
                    yield from _tiles_of(half)


def _rectangle(q0: int, q1: int, k0: int, k1: int) -> Iterator[Tile]:
    if q0 < q1 and k0 < k1:
        yield Tile(q0, q1, k0, k1)


def _join_full(tiles: list[Tile]) -> list[Tile]:
    """Join FULL tiles of the same queries and adjoining keys, and then those of the same keys and adjoining queries."""
    full = sorted(tile for tile in tiles if tile.kind == FULL)
    joined: list[Tile] = []
    for tile in full:
        last = joined[-1] if joined else None
        if last is not None and last[:2] == tile[:2] and last.k1 == tile.k0:
            joined[-1] = last._replace(k1=tile.k1)
        else:
            joined.append(tile)
    below: dict[tuple[int, int, int], Tile] = {}  # by keys and first query that would continue the tile
    for tile in joined:
        above = below.pop((tile.k0, tile.k1, tile.q0), None)
        tile = tile if above is None else tile._replace(q0=above.q0)
        below[tile.k0, tile.k1, tile.q1] = tile
    return [tile for tile in tiles if tile.kind != FULL] + list(below.values())


def _join_causal(tiles: list[Tile]) -> list[Tile]:
    """Join two CAUSAL squares on one diagonal with the FULL rectangle between them into one CAUSAL square."""
    squares = sorted(tile for tile in tiles if tile.kind == CAUSAL)
    rest = {tile for tile in tiles if tile.kind != CAUSAL}
    joined: list[Tile] = []
    for tile in squares:
        last = joined[-1] if joined else None
        if last is not None and last.q1 == tile.q0 and last.k1 == tile.k0:
            between = Tile(tile.q0, tile.q1, last.k0, last.k1)
            wide = next(
                (full for full in rest if full[:2] == tile[:2] and full.k1 == last.k1 and full.k0 <= last.k0), None
            )
            # The rectangle may reach further left than the square needs: that part stays a tile of its own.
            if wide is not None and wide.kind == FULL:
                rest.discard(wide)
                if wide.k0 < between.k0:
                    rest.add(wide._replace(k1=between.k0))
                joined[-1] = last._replace(q1=tile.q1, k1=tile.k1)
                continue
        joined.append(tile)
    return [*rest, *joined]
