"""The layout of context parallelism as data: how one stream of tokens is split over the ranks of `cp`.

Ranks form a grid of `groups × ulysses`; consecutive ranks make a group. The ranks of a group hold one share of the stream
and split the heads (Ulysses). Groups exchange keys and values by the `exchange`. A layout travels to the attention operator
as one int64 tensor, so that it survives recompute and torch.compile. Every rank plans all its messages from it alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from meshkit.core.attention_tiles import Tile, tiles
from meshkit.mask import Band, Interval, Mask
from meshkit.parallel.context._assign import Runs
from meshkit.parallel.context._pattern import Pattern
from meshkit.strategy import BlockTopK, Sparse, VerticalSlash

KVExchange = Literal["ring", "double_ring", "all_gather", "group_cast"]
KV_EXCHANGES: tuple[KVExchange, ...] = ("ring", "double_ring", "all_gather", "group_cast")
_SPARSE: tuple[type[Sparse], ...] = (BlockTopK, VerticalSlash)


@dataclass(frozen=True)
class Layout:
    """runs: the global tokens of each rank in its local order. lengths: local tokens of each rank, end padding included.
    sparse: how blocks of keys are chosen, with the documents that are cut into blocks."""

    mask: Mask
    runs: tuple[Runs, ...]
    lengths: tuple[int, ...]
    exchange: KVExchange
    ulysses: int = 1
    kv_heads: int = 1  # all_gather: key/value heads per message
    node: int = 1  # double_ring: groups of a node
    sparse: Sparse | None = None
    documents: Runs = ()

    @property
    def ranks(self) -> int:
        return len(self.runs)

    @property
    def groups(self) -> int:
        return self.ranks // self.ulysses

    def seen_by(self, pattern: Pattern | None, row: int | None = None) -> Layout:
        """The same split of what a layer sees; None: all that the mask shows. row: as in `Pattern.of`."""
        return replace(self, mask=pattern.of(self.mask, row)) if pattern is not None and pattern.cuts else self

    def on_one_rank(self) -> Layout:
        """Of ranks that have all tokens each, in their order: nothing is sent."""
        nothing = self.ranks - 1
        return replace(
            self,
            runs=(((0, self.mask.tokens),), *((),) * nothing),
            lengths=(self.mask.tokens, *(0,) * nothing),
            exchange="ring",
            ulysses=self.ranks,
            kv_heads=1,
        )

    def members(self, group: int) -> range:
        return range(group * self.ulysses, (group + 1) * self.ulysses)

    def group_length(self, group: int) -> int:
        """Tokens of the group's tensors, padding included."""
        return sum(self.lengths[rank] for rank in self.members(group))

    def group_runs(self, group: int) -> Iterator[tuple[int, int, int]]:
        """(first, after, offset) of the group's runs: token `first` lies at `offset` of the group's tensors."""
        base = 0
        for rank in self.members(group):
            offset = base
            for first, after in self.runs[rank]:
                yield first, after, offset
                offset += after - first
            base += self.lengths[rank]

    @cached_property
    def all_runs(self) -> list[tuple[int, int, int, int]]:
        """(first, after, group, offset) of every run, in order of the tokens."""
        return sorted(
            (first, after, group, offset)
            for group in range(self.groups)
            for first, after, offset in self.group_runs(group)
        )

    def bands(self, group: int) -> dict[int, list[Band]]:
        """The mask between this group's queries and the keys of each group that they see, by group of the keys.

        Bands count queries by their offset in this group's tensors, keys by their offset in the other group's.
        """
        # Bisections in place of a product of all bands and all runs: a packed batch has many of both.
        firsts = [run[0] for run in self.all_runs]
        by_query = sorted(self.mask.bands)
        ends = list(accumulate((band.q1 for band in by_query), max))
        bands_of: dict[int, list[Band]] = {}
        for q_first, q_after, q_offset in self.group_runs(group):
            # Bands are in order of q0; those before `start` end before this run begins.
            start = bisect_right(ends, q_first)
            for band in by_query[start:]:
                if band.q0 >= q_after:
                    break
                visible = band.clip((q_first, q_after), (0, self.mask.tokens))
                if visible is None:
                    continue
                index = max(bisect_right(firsts, visible.k0) - 1, 0)
                while index < len(firsts) and firsts[index] < visible.k1:
                    k_first, k_after, owner, k_offset = self.all_runs[index]
                    piece = visible.clip((q_first, q_after), (k_first, k_after))
                    if piece is not None:
                        bands_of.setdefault(owner, []).append(piece.moved(q_offset - q_first, k_offset - k_first))
                    index += 1
        return bands_of

    def table(self) -> Tensor:
        """This layout as one int64 tensor; `layout_of` is its inverse."""
        head = [
            self.mask.tokens,
            len(self.mask.bands),
            self.ranks,
            KV_EXCHANGES.index(self.exchange),
            self.ulysses,
            self.kv_heads,
            self.node,
            0 if self.sparse is None else 1 + _SPARSE.index(type(self.sparse)),
            len(self.documents),
        ]
        bands = [value for band in self.mask.bands for value in band]
        ranks = [
            value
            for runs, length in zip(self.runs, self.lengths, strict=True)
            for value in (length, len(runs), *(edge for run in runs for edge in run))
        ]
        blocks = [edge for document in self.documents for edge in document]
        chosen = () if self.sparse is None else astuple(self.sparse)
        return torch.tensor([*head, *bands, *ranks, *blocks, *chosen], dtype=torch.int64)


def layout_of(table: Tensor) -> Layout:
    """The layout of a table. Cached by content and not by identity: recompute and torch.compile may copy the table."""
    # On the host, or this read would wait for the device in every layer.
    return _decode(table.numpy().tobytes())


@lru_cache(maxsize=128)
def _decode(content: bytes) -> Layout:
    # A bytearray, since frombuffer warns of memory that cannot be written.
    values = iter(torch.frombuffer(bytearray(content), dtype=torch.int64).tolist())
    tokens, bands, ranks, exchange, ulysses, kv_heads, node, sparse, documents = (next(values) for _ in range(9))
    mask = Mask(tokens, tuple(Band(*(next(values) for _ in range(6))) for _ in range(bands)))
    lengths, runs = [], []
    for _ in range(ranks):
        lengths.append(next(values))
        runs.append(tuple((next(values), next(values)) for _ in range(next(values))))
    blocks = tuple((next(values), next(values)) for _ in range(documents))
    kind = _SPARSE[sparse - 1] if sparse else None
    chosen = None if kind is None else kind(**dict(zip((each.name for each in fields(kind)), values, strict=True)))
    split = mask, tuple(runs), tuple(lengths), KV_EXCHANGES[exchange]
    return Layout(*split, ulysses, kv_heads, node, chosen, blocks)


@dataclass(frozen=True)
class Step:
    """One block of keys and what a group computes with it.

    The keys belong to group `owner`. The group at hand has received its intervals `keys`, laid end to end.
    """

    owner: int
    keys: tuple[Interval, ...]  # offsets in the owner's tensors
    tiles: list[Tile]  # their keys count over `keys` laid end to end


@dataclass(frozen=True)
class Plan:
    """The kernel calls and messages of one group. steps[t] computes with the keys of group `owner_at(t)`."""

    layout: Layout
    group: int
    steps: list[Step]
    sends: list[tuple[Interval, ...]]  # group_cast: sends[t] are the keys that group (group + t) needs


def owner_at(layout: Layout, group: int, t: int) -> int:
    """Whose keys a group computes with in step t: of group - t, or in two levels first of all of its node, then of the node
    before, ..."""
    if layout.exchange != "double_ring":
        return (group - t) % layout.groups
    (home, place), (o, i) = divmod(group, layout.node), divmod(t, layout.node)
    return (home - o) % (layout.groups // layout.node) * layout.node + (place - i) % layout.node


@lru_cache(maxsize=1024)
def plan(layout: Layout, group: int) -> Plan:
    """The plan of one group. Pure: a sender computes what its receivers need, and no rank has to ask."""
    needs = {other: _needs(layout, other) for other in range(layout.groups)} if layout.exchange == "group_cast" else {}
    bands = layout.bands(group)
    steps = []
    for t in range(layout.groups):
        owner = owner_at(layout, group, t)
        visible = bands.get(owner, [])
        keys: tuple[Interval, ...] = ((0, layout.group_length(owner)),)
        # A ring sends whole blocks on, needed here or not: the next group may need what this one does not.
        if layout.exchange == "group_cast" and t > 0:
            # The union: keys that several bands see travel once.
            keys = _union((band.k0, band.k1) for band in visible)
            visible = [_compact(band, keys) for band in visible]
        steps.append(Step(owner, keys, tiles(visible)))
    sends = [needs[(group + t) % layout.groups].get(group, ()) if t and needs else () for t in range(layout.groups)]
    return Plan(layout, group, steps, sends)


@lru_cache(maxsize=1024)
def gathered_tiles(layout: Layout, group: int) -> list[Tile]:
    """The kernel calls of one group over all keys, gathered in the order of the tokens."""
    bands = []
    for q_first, q_after, q_offset in layout.group_runs(group):
        for band in layout.mask.bands:
            visible = band.clip((q_first, q_after), (0, layout.mask.tokens))
            if visible is not None:
                bands.append(visible.moved(q_offset - q_first, 0))
    return tiles(bands)


@lru_cache(maxsize=1024)
def _needs(layout: Layout, group: int) -> dict[int, tuple[Interval, ...]]:
    """The keys of each other group that this group's queries see, by offset in the owner's tensors."""
    return {
        owner: _union((band.k0, band.k1) for band in bands)
        for owner, bands in layout.bands(group).items()
        if owner != group
    }


def _union(intervals: Iterator[Interval]) -> tuple[Interval, ...]:
    joined: list[Interval] = []
    for first, after in sorted(intervals):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(after, joined[-1][1]))
        else:
            joined.append((first, after))
    return tuple(joined)


def _compact(band: Band, keys: tuple[Interval, ...]) -> Band:
    """The band with its keys counted over `keys` laid end to end."""
    offset = 0
    for first, after in keys:
        if first <= band.k0 < after:
            return band.moved(0, offset - first)
        offset += after - first
    raise AssertionError("a band's keys lie in one interval of their union")
