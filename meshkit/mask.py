"""Attention masks: causal, sliding window, packed documents, prefix; for the model, the split over ranks and the kernels.

A mask is a list of bands. A `Band` is a rectangle of (query, key) pairs in which those with `low <= key - query <= high` are
visible. Causal attention is one band with high = 0; a sliding window of w tokens is one with low = 1 - w too; packed
documents are one band each. The intersection of a band with a rank's tokens is a band again, so planning is arithmetic on a
few integers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from meshkit.errors import PlanError

# A number and not infinity: bands travel in int64 tables, and sums with positions stay exact and far from overflow.
FAR = 1 << 40
"""a distance that no sequence reaches: stands for no bound"""

Kind = Literal["full", "causal"]
Interval = tuple[int, int]


class Band(NamedTuple):
    """Queries [q0, q1) see the keys of [k0, k1) for which low <= key - query <= high."""

    q0: int
    q1: int
    k0: int
    k1: int
    low: int = -FAR
    high: int = FAR

    def clip(self, queries: Interval, keys: Interval) -> Band | None:
        """The intersection with these queries and keys, shrunk to visible rows and columns; None if it is empty."""
        q0, q1 = max(self.q0, queries[0]), min(self.q1, queries[1])
        k0, k1 = max(self.k0, keys[0]), min(self.k1, keys[1])
        # A query sees something if [q + low, q + high] meets [k0, k1); a key is seen if [k - high, k - low] meets [q0, q1).
        q0, q1 = max(q0, k0 - self.high), min(q1, k1 - self.low)
        k0, k1 = max(k0, q0 + self.low), min(k1, q1 + self.high)
        if q0 >= q1 or k0 >= k1 or self.low > self.high:
            return None
        # A bound that every pair of the rectangle meets is none, so that equal sets of pairs are equal bands.
        low = self.low if self.low > k0 - (q1 - 1) else -FAR
        high = self.high if self.high < (k1 - 1) - q0 else FAR
        return Band(q0, q1, k0, k1, low, high)

    def moved(self, queries: int, keys: int) -> Band:
        """The same band with `queries` added to its query numbers and `keys` to its key numbers."""
        low = self.low + keys - queries if self.low != -FAR else -FAR
        high = self.high + keys - queries if self.high != FAR else FAR
        return Band(self.q0 + queries, self.q1 + queries, self.k0 + keys, self.k1 + keys, low, high)

    @property
    def area(self) -> int:
        """Visible pairs."""
        return max(self._seen(self.high) - self._seen(self.low - 1), 0)

    def _seen(self, bound: int) -> int:
        """Pairs of the rectangle with key - query <= bound."""
        rows, columns = self.q1 - self.q0, self.k1 - self.k0
        first = self.q0 + bound - self.k0 + 1  # keys the first query sees, before it is cut to 0..columns

        def total(count: int) -> int:  # 1 + 2 + ... + count
            return count * (count + 1) // 2 if count > 0 else 0

        # Row i sees clamp(first + i, 0, columns) keys: the triangle up to `last`, less what is cut on both sides.
        last = first + rows - 1
        return total(last) - total(first - 1) - total(last - columns) + total(first - 1 - columns)


@dataclass(frozen=True)
class Mask:
    """An attention mask over `tokens` tokens. Bands do not overlap; a query in no band attends to nothing.

    Made by the functions below; `Mask.intervals` is the general one.
    """

    tokens: int
    bands: tuple[Band, ...]

    @staticmethod
    def causal(tokens: int, *, window: int | None = None, sinks: int = 0) -> Mask:
        """A query sees itself and what came before it; with `window`, that many tokens, itself included, and the first
        `sinks` tokens."""
        return Mask.documents([tokens], window=window, sinks=sinks)

    @staticmethod
    def full(tokens: int) -> Mask:
        """Every query sees every key."""
        return Mask.documents([tokens], kind="full")

    @staticmethod
    def documents(lengths: Iterable[int], *, window: int | None = None, sinks: int = 0, kind: Kind = "causal") -> Mask:
        """Documents of these lengths, end to end; none sees another. window, sinks: as in `windowed`."""
        if kind not in ("full", "causal"):
            raise PlanError(f"Mask.documents: kind {kind!r} is neither 'full' nor 'causal'.")
        bands, start = [], 0
        for length in lengths:
            if length < 0:
                raise PlanError(f"Mask.documents: a document has length {length}. Lengths are at least 0.")
            # An empty document leaves no band, so that masks which show the same are equal.
            if length:
                end = start + length
                bands.append(Band(start, end, start, end, high=0 if kind == "causal" else FAR))
                start = end
        return Mask(start, tuple(bands)).windowed(window, sinks=sinks)

    @staticmethod
    def prefix_lm(lengths: Sequence[int], prefixes: Sequence[int]) -> Mask:
        """Documents whose first `prefix` tokens are seen by all of their document, and whose other tokens are causal."""
        if len(lengths) != len(prefixes):
            raise PlanError(f"Mask.prefix_lm: {len(lengths)} lengths, but {len(prefixes)} prefixes. Give one for each.")
        bands, start = [], 0
        for length, prefix in zip(lengths, prefixes, strict=True):
            if not 0 <= prefix <= length:
                raise PlanError(f"Mask.prefix_lm: a prefix of {prefix} tokens does not fit a document of {length}.")
            middle, end = start + prefix, start + length
            bands += [Band(start, end, start, middle), Band(middle, end, middle, end, high=0)]
            start = end
        return Mask(start, tuple(band for band in bands if band.area > 0))

    @staticmethod
    def intervals(tokens: int, entries: Iterable[tuple[Interval, Interval, Kind] | Band]) -> Mask:
        """Entries (queries, keys, kind), each interval [first, after last), or a `Band` with any bounds.

        "causal" shows a query the keys that are not after it, counted over the whole sequence; "full" all of the entry.
        Raises: PlanError for intervals outside the sequence, and for entries that show a pair twice, which would count it
        twice in the softmax.
        """
        bands: list[Band] = []
        for entry in entries:
            if not isinstance(entry, Band):
                (q0, q1), (k0, k1), kind = entry
                if kind not in ("full", "causal"):
                    raise PlanError(
                        f"Mask.intervals: kind {kind!r} is neither 'full' nor 'causal'. Use a Band for others."
                    )
                entry = Band(q0, q1, k0, k1, high=0 if kind == "causal" else FAR)
            if not (0 <= entry.q0 <= entry.q1 <= tokens and 0 <= entry.k0 <= entry.k1 <= tokens):
                raise PlanError(f"Mask.intervals: {entry} lies outside of the {tokens} tokens.")
            clipped = entry.clip((0, tokens), (0, tokens))
            # Of visible pairs, not of rectangles: a causal entry leaves half of its rectangle to others.
            for other in bands:
                if clipped is not None and _overlap(clipped, other) is not None:
                    raise PlanError(
                        f"Mask.intervals: {entry} and {other} both show some pair of query and key. Make them disjoint."
                    )
            if clipped is not None:
                bands.append(clipped)
        return Mask(tokens, tuple(bands))

    @staticmethod
    def from_positions(position_ids: Tensor, *, window: int | None = None) -> Mask:
        """The causal documents of position_ids [B, T], rows end to end: B*T tokens.

        A document starts at each row and wherever a position is not the one before plus 1. Reads the tensor.
        """
        starts = torch.ones_like(position_ids, dtype=torch.bool)
        starts[:, 1:] = position_ids.diff(dim=1) != 1
        # On the host: bands are Python integers. On a device this waits, once for each batch.
        firsts = [*starts.flatten().nonzero().flatten().tolist(), position_ids.numel()]
        return Mask.documents([after - first for first, after in pairwise(firsts)], window=window)

    def windowed(self, window: int | None, *, sinks: int = 0) -> Mask:
        """This mask less the keys that are `window` or more tokens before their query. None changes nothing.

        sinks: so many first tokens of each document stay visible. Source: Xiao et al. 2023 (StreamingLLM).
        """
        if window is None:
            if sinks:
                raise PlanError(f"Mask: sinks={sinks} are kept beside a window, and there is none. Give a window.")
            return self
        if window < 1:
            raise PlanError(f"Mask: a window of {window} tokens shows nothing. Give at least 1, or None.")
        if sinks < 0:
            raise PlanError(f"Mask: {sinks} sinks cannot be. Give at least 0.")
        every = (0, self.tokens)
        starts = [first for first, _ in self.components]
        clipped = list[Band | None]()
        for band in self.bands:
            clipped.append(band._replace(low=max(band.low, 1 - window)).clip(every, every))
            first = starts[bisect_right(starts, min(band.q0, band.k0)) - 1]
            clipped.append(band._replace(high=min(band.high, -window)).clip(every, (first, first + sinks)))
        return Mask(self.tokens, tuple(band for band in clipped if band is not None))

    def chunked(self, size: int | None, row: int | None = None) -> Mask:
        """This mask less the pairs of different chunks of `size` tokens, counted from the start of each row of `row` tokens;
        default: of one row. None changes nothing."""
        if size is None:
            return self
        row = row or self.tokens
        starts = [first + chunk for first in range(0, self.tokens, row) for chunk in range(0, row, size)]
        chunks = [(first, after) for first, after in pairwise([*starts, self.tokens])]
        return self._clipped([(chunk, chunk) for chunk in chunks])

    def seeing(self, shown: Tensor) -> Mask:
        """This mask less the keys that are not shown. shown: bool [tokens], on the host; they may begin and end anywhere."""
        # 1 where a run of shown keys begins, -1 where it ends.
        edges = torch.nn.functional.pad(shown.long(), (1, 1)).diff()
        runs = zip((edges > 0).nonzero().flatten().tolist(), (edges < 0).nonzero().flatten().tolist(), strict=True)
        return self._clipped([((0, self.tokens), run) for run in runs])

    def _clipped(self, rectangles: Sequence[tuple[Interval, Interval]]) -> Mask:
        """What lies in one of these rectangles (queries, keys), which do not overlap."""
        clipped = (band.clip(queries, keys) for queries, keys in rectangles for band in self.bands)
        return Mask(self.tokens, tuple(band for band in clipped if band is not None))

    @staticmethod
    def joined(masks: Iterable[Mask]) -> Mask:
        """The masks' tokens end to end; none sees another's."""
        bands, start = list[Band](), 0
        for mask in masks:
            bands += [band.moved(start, start) for band in mask.bands]
            start += mask.tokens
        return Mask(start, tuple(bands))

    @cached_property
    def area(self) -> int:
        """Visible pairs, to which the work of attention is proportional."""
        return sum(band.area for band in self.bands)

    @cached_property
    def components(self) -> tuple[Interval, ...]:
        """The intervals of tokens that are connected by visible pairs: the documents, where documents are packed."""
        # In order of their first token, each span either meets the last interval or begins a new one.
        spans = sorted((min(band.q0, band.k0), max(band.q1, band.k1)) for band in self.bands)
        merged: list[Interval] = []
        for first, after in spans:
            if merged and first < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(after, merged[-1][1]))
            else:
                merged.append((first, after))
        return tuple(merged)

    @property
    def sees_ahead(self) -> bool:
        """Does some query see a key after it?"""
        return any(min(band.high, band.k1 - 1 - band.q0) > 0 for band in self.bands)

    def refuse_misfit(self, rows: int, tokens: int) -> None:
        """Raises: PlanError unless this is the mask of one row, or of all rows end to end with no pair across rows."""
        if self.tokens == tokens:
            return
        if self.tokens != rows * tokens:
            raise PlanError(
                f"the mask is of {self.tokens} tokens, but the batch has {rows} rows of {tokens}. Give a mask of {tokens} "
                f"tokens for every row, or of all {rows * tokens} tokens, rows end to end."
            )
        # A component lies in one row exactly if none of its pairs crosses rows.
        for first, after in self.components:
            if first // tokens != (after - 1) // tokens:
                raise PlanError(
                    f"the mask shows tokens of row {first // tokens} and row {(after - 1) // tokens} to each other, but rows "
                    "are sequences of their own. Lay the tokens in one row."
                )

    def shows(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether each pair of token numbers is visible; broadcasts; bool."""
        distance = keys - queries
        shown = torch.zeros_like(distance, dtype=torch.bool)
        for band in self.bands:
            inside = (queries >= band.q0) & (queries < band.q1) & (keys >= band.k0) & (keys < band.k1)
            shown |= inside & (distance >= band.low) & (distance <= band.high)
        return shown

    def dense(self, device: torch.device | None = None) -> Tensor:
        """The mask as a bool tensor [tokens, tokens]."""
        token = torch.arange(self.tokens, device=device)
        return self.shows(token.unsqueeze(-1), token.unsqueeze(0))

    @property
    def is_causal(self) -> bool:
        """Plain causal attention over all tokens, which has the fastest kernels."""
        return self == _plain(self.tokens)


# Cached: every attention layer asks `is_causal`.
@lru_cache
def _plain(tokens: int) -> Mask:
    return Mask.causal(tokens)


def _overlap(band: Band, other: Band) -> Band | None:
    both = band._replace(low=max(band.low, other.low), high=min(band.high, other.high))
    return both.clip((other.q0, other.q1), (other.k0, other.k1))
