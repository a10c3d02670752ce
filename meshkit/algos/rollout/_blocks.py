"""Contiguous rows of the KV cache: sequences of similar length side by side, so that attention reads them where they are.

A block is a run of pages, as many for each of its sequences, which lie one after the other. Where one has no room left all
get more of it, and where one has ended the last one takes its place: what is copied then is small beside what attention
would copy in each step of a cache whose pages lie anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshkit.algos.rollout._answers import Answer, Group
from meshkit.algos.rollout._cache import Pages, Span

SLACK_PAGES = 16  # reading up to half as many pages in vain is cheaper than one more attention call
ROOM = 4  # pages for each one that is made ahead, since making room copies a block


def spans_of(table: np.ndarray, begin: int, end: int, page_tokens: int) -> list[Span]:
    """Where the tokens from `begin` to `end` of a sequence with these pages are, of each page those together."""
    spans = []
    while begin < end:
        page, place = divmod(begin, page_tokens)
        tokens = min(page_tokens - place, end - begin)
        spans.append(Span(int(table[page]) * page_tokens + place, tokens))
        begin += tokens
    return spans


@dataclass(eq=False)
class Growing:
    """One answer whose keys and values are in the cache.

    table: its pages, then its last page again, up to the most pages any sequence may need; of one in a block empty, since its
    pages follow from its place there, -1 before it has one.
    """

    group: Group
    answer: Answer
    cached: int  # tokens of the prompt and of the answer that are in the KV cache
    table: np.ndarray
    pages: int
    block: Block | None = None
    place: int = -1

    def spans(self, begin: int, end: int, page_tokens: int) -> list[Span]:
        """Where its tokens from `begin` to `end` are."""
        if self.block is None:
            return spans_of(self.table, begin, end, page_tokens)
        first, stride = self.block.first + self.place * self.block.stride, self.block.stride
        return [Span(first * page_tokens, end - begin, stride * page_tokens, begin)]

    def add_page(self, page: int) -> None:
        self.table[self.pages :] = page
        self.pages += 1


@dataclass(eq=False)
class Block:
    """`stride` pages for each row, from page `first` on.

    laid: how many rows have pages. stale: rows have ended or come since. shortest, longest: tokens of a row in the cache.
    """

    rows: list[Growing] = field(default_factory=list)
    first: int = 0
    stride: int = 0
    laid: int = 0
    stale: bool = False
    shortest: int = 0
    longest: int = 0

    def measure(self) -> None:
        lengths = [row.cached for row in self.rows]
        self.shortest, self.longest = min(lengths), max(lengths)


Copies = tuple[list[Span], list[Span]]


class Blocks:
    """The blocks of a cache."""

    def __init__(self, pages: Pages, page_tokens: int) -> None:
        self._pages, self._page_tokens = pages, page_tokens
        self._blocks: list[Block] = []

    @property
    def rows(self) -> list[Growing]:
        """In the order in which they lie."""
        return [row for block in self._blocks for row in block.rows]

    def arrange(self, fresh: Sequence[Growing]) -> Copies | None:
        """Give these and all others room for another token: (from, to), what to copy for it, or None if nothing changes."""
        if not fresh and not any(self._changes(block) for block in self._blocks):
            return None
        self._merge()
        self._join(fresh)
        changed = [block for block in self._blocks if self._changes(block)]
        for block in changed:
            self._give_back(block)
        copies: Copies = ([], [])
        for block in changed:
            self._lay(block, copies)
        return copies

    def grow(self, *, changed: bool) -> None:
        """The rows have grown by a token; all alike, or those that have just come did not."""
        for block in self._blocks:
            if changed:
                block.measure()
            else:
                block.shortest += 1
                block.longest += 1

    def remove(self, rows: Sequence[Growing]) -> None:
        ended = set(map(id, rows))
        for block in {id(row.block): row.block for row in rows if row.block is not None}.values():
            block.rows, block.stale = [row for row in block.rows if id(row) not in ended], True
            if block.rows:
                block.measure()
            else:
                self._give_back(block)
                self._blocks.remove(block)

    def _changes(self, block: Block) -> bool:
        return block.stale or block.longest >= block.stride * self._page_tokens

    def _give_back(self, block: Block) -> None:
        self._pages.give_back_run(block.first, block.laid * block.stride)

    def _similar(self, shortest: int, longest: int) -> bool:
        """May sequences of these lengths be read together, to the length of the longest?"""
        size = self._page_tokens
        return 2 * -(-longest // size) <= 3 * -(-shortest // size) + SLACK_PAGES

    def _merge(self) -> None:
        """Blocks whose lengths have become similar, as they do by growing alike."""
        merged: list[Block] = []
        for block in sorted(self._blocks, key=lambda block: block.shortest):
            if merged and self._similar(merged[-1].shortest, max(merged[-1].longest, block.longest)):
                into, other = sorted((merged.pop(), block), key=lambda block: -len(block.rows))
                self._give_back(other)
                into.rows, into.stale = into.rows + other.rows, True
                into.measure()
                block = into
            merged.append(block)
        self._blocks = merged

    def _join(self, fresh: Sequence[Growing]) -> None:
        for row in sorted(fresh, key=lambda row: row.cached):
            for block in self._blocks:
                shortest, longest = min(block.shortest, row.cached), max(block.longest, row.cached)
                if self._similar(shortest, longest):
                    break
            else:
                block, shortest, longest = Block(), row.cached, row.cached
                self._blocks.append(block)
            block.rows.append(row)
            block.stale = True
            block.shortest, block.longest = shortest, longest

    def _lay(self, block: Block, copies: Copies) -> None:
        """Rows that stay where they are fill the block from its beginning, others the places between and after them."""
        needed, stride = -(-(block.longest + 1) // self._page_tokens), block.stride
        if needed > stride:
            stride = needed + needed // ROOM
        first = self._pages.take_run(len(block.rows) * stride, at=block.first)
        stays = first == block.first and stride == block.stride
        there = [row for row in block.rows if row.block is not None]
        rows: list[Growing | None] = [None] * len(there)
        moving = []
        for row in there:
            if stays and row.block is block and row.place < len(rows):
                rows[row.place] = row
            else:
                moving.append(row)
                copies[0].extend(row.spans(0, row.cached, self._page_tokens))
        come = [row for row in block.rows if row.block is None]
        others = iter([*moving, *come])
        block.rows = [row or next(others) for row in [*rows, *([None] * len(come))]]
        block.first, block.stride, block.laid, block.stale = first, stride, len(block.rows), False
        for place, row in enumerate(block.rows):
            row.place = place
        for row in come:
            row.block = block
        for row in moving:
            row.block = block
            copies[1].extend(row.spans(0, row.cached, self._page_tokens))
