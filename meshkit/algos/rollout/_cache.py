"""Paged KV cache (PagedAttention): keys and values in pages that sequences take as they grow, share, and give back.

Dims: S slots (pages x page_tokens), T tokens, K key/value heads, D head_dim.
"""

from __future__ import annotations

import sys
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshkit.algos.rollout._count import is_count
from meshkit.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class CachePolicy:
    """How much memory of a rank generation takes.

    page_tokens: tokens of a page, the unit in which sequences take memory. max_tokens: the size of the cache, at which new
    answers wait until others end; None lets it grow. max_sequences: answers that grow at the same time. prefill_tokens: the
    most prompt tokens that begin in one step; a single prompt may be longer.
    keep_parameters: gather parameters once for the whole call, instead of once for every step.
    """

    page_tokens: int = 16
    max_tokens: int | None = None
    max_sequences: int = 256
    prefill_tokens: int = 8192
    keep_parameters: bool = True

    def __post_init__(self) -> None:
        for name in ("page_tokens", "max_tokens", "max_sequences", "prefill_tokens"):
            value = getattr(self, name)
            if not (value is None and name == "max_tokens") and not is_count(value):
                raise PlanError(f"CachePolicy({name}={value!r}): it must be a whole number of at least 1.")

    @property
    def max_pages(self) -> int | None:
        return None if self.max_tokens is None else self.max_tokens // self.page_tokens

    def pages(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)


class Pages:
    """Reference counts of pages. The lowest free pages are taken first, so that the cache stays small.

    At `limit` pages in use `evict` is asked to give one back before another is taken. allocated: for how many pages the cache
    must have room.
    """

    def __init__(self) -> None:
        self._users: dict[int, int] = {}
        self._free = [(0, sys.maxsize)]  # in order, [first, after) of pages without users
        self.allocated = 0
        self.limit: int | None = None
        self.evict: Callable[[], bool] = lambda: False

    @property
    def used(self) -> int:
        return len(self._users)

    def users(self, page: int) -> int:
        return self._users[page]

    def take(self) -> int:
        if self.limit is not None and self.used >= self.limit:
            self.evict()
        return self.take_run(1)

    def take_run(self, count: int, at: int = -1) -> int:
        """The first of so many pages one after the other: from `at` on where those are free, else the lowest ones."""
        fits = next((index for index, (first, after) in enumerate(self._free) if first <= at <= after - count), None)
        if fits is None:
            fits = next(index for index, (first, after) in enumerate(self._free) if first <= after - count)
            at = self._free[fits][0]
        first, after = self._free[fits]
        self._free[fits : fits + 1] = [run for run in ((first, at), (at + count, after)) if run[0] < run[1]]
        self._users.update(dict.fromkeys(range(at, at + count), 1))
        self.allocated = max(self.allocated, at + count)
        return at

    def share(self, page: int) -> int:
        self._users[page] += 1
        return page

    def give_back(self, page: int) -> None:
        self._users[page] -= 1
        if self._users[page]:
            return
        del self._users[page]
        self._add_free(page, page + 1)

    def give_back_run(self, first: int, count: int) -> None:
        """Pages that have one user each."""
        for page in range(first, first + count):
            del self._users[page]
        if count:
            self._add_free(first, first + count)

    def _add_free(self, first: int, after: int) -> None:
        index = bisect(self._free, (first, after))
        if index < len(self._free) and self._free[index][0] == after:
            after = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == first:
            index -= 1
            first = self._free.pop(index)[0]
        self._free.insert(index, (first, after))


class Span(NamedTuple):
    """Tokens of one sequence: of a row in a block, which has `stride` slots from the slot `first` on, those after `before`
    others; else those in the slots from `first` on.
    """

    first: int
    tokens: int
    stride: int = 0
    before: int = 0


class Places(NamedTuple):
    """Where T tokens are in a layer's keys or values [S * K, D]: head h at start * K + offset + h * step, each int64 [T].

    In a page the heads of a token follow each other; in a row of a block the tokens of a head do, which attention reads then
    from one piece of memory.
    """

    start: Tensor
    offset: Tensor
    step: Tensor

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> Places:
        """The tokens of these, in their order."""
        columns = np.array(spans, np.int64).reshape(-1, len(Span._fields)).T
        counts = columns[1]
        first, _, stride, before = np.repeat(columns, counts, axis=1)
        token = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts) + before
        in_block = stride > 0
        parts = (np.where(in_block, first, first + token), np.where(in_block, token, 0), np.maximum(stride, 1))
        return cls(*torch.from_numpy(np.stack(parts)).to(device))

    def rows(self, heads: int) -> Tensor:
        """[T * K]"""
        head_K = torch.arange(heads, device=self.start.device)
        return ((self.start * heads + self.offset).unsqueeze(1) + head_K * self.step.unsqueeze(1)).flatten()

    @property
    def slots(self) -> Tensor:
        """[T], one for each token."""
        return self.start + self.offset


class KeyValueCache:
    """The keys and values of this rank's layers. A layer is identified by its place in the order of attention.

    choices: [S, R, K] int16, beside them the experts that routers chose, where they are recorded; see `meshkit.moe.ROUTING`.
    """

    GROWTH = 1.25  # room is made ahead, since making room copies all of a layer

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens, self.pages = page_tokens, Pages()
        self._layers: list[_Layer] = []
        self.choices: Tensor | None = None

    def write(self, layer: int, rows: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Put tokens into their rows, as `Places` numbers them; returns the layer's keys and values, each [S * K, D]."""
        # Layers are created at their first call: how many, and with how many heads on this rank, only the model knows.
        if layer == len(self._layers):
            heads = k_TKD.shape[1]
            self._layers.append(_Layer(heads, k_TKD.new_zeros(0, k_TKD.shape[2]), v_TKD.new_zeros(0, v_TKD.shape[2])))
        stored = self._with_room(layer)
        stored.keys.index_copy_(0, rows, k_TKD.flatten(0, 1))
        stored.values.index_copy_(0, rows, v_TKD.flatten(0, 1))
        return stored.keys, stored.values

    def copy(self, sources: Sequence[Span], targets: Sequence[Span]) -> None:
        """Copy tokens, in all layers."""
        if not sources or not self._layers:
            return
        device = self._layers[0].keys.device
        read, written = Places.of(sources, device), Places.of(targets, device)
        rows: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in range(len(self._layers)):
            stored = self._with_room(layer)
            if stored.heads not in rows:
                rows[stored.heads] = read.rows(stored.heads), written.rows(stored.heads)
            rows_read, rows_written = rows[stored.heads]
            for each in (stored.keys, stored.values):
                # All are read before any is written: what one is copied to may be what another is copied from.
                each.index_copy_(0, rows_written, each.index_select(0, rows_read))
        if self.choices is not None:
            choices = self._choices_with_room(self.choices)
            choices.index_copy_(0, written.slots, choices.index_select(0, read.slots))

    def write_choices(self, slots: Tensor, routers: Tensor, choices_TrK: Tensor) -> None:
        """Put what this rank's routers chose beside the keys of these tokens."""
        assert self.choices is not None
        self._choices_with_room(self.choices)[slots.unsqueeze(1), routers] = choices_TrK

    def _choices_with_room(self, choices_SRK: Tensor) -> Tensor:
        slots = self.pages.allocated * self.page_tokens
        if len(choices_SRK) < slots:
            self.choices = choices_SRK = _grown(choices_SRK, int(self.pages.allocated * self.GROWTH) * self.page_tokens)
        return choices_SRK

    def _with_room(self, layer: int) -> _Layer:
        """Keys and values of the layer, with slots for all pages."""
        pages, stored = self.pages.allocated, self._layers[layer]
        size = self.page_tokens * stored.heads
        if len(stored.keys) < pages * size:
            # Exact at first: a short call never pays for room ahead.
            rows = int(pages * (self.GROWTH if len(stored.keys) else 1.0)) * size
            stored = self._layers[layer] = _Layer(stored.heads, _grown(stored.keys, rows), _grown(stored.values, rows))
        return stored


class _Layer(NamedTuple):
    """keys, values: [S * K, D], as `Places` numbers their rows. heads: K."""

    heads: int
    keys: Tensor
    values: Tensor


def _grown(stored: Tensor, rows: int) -> Tensor:
    # Zeros, not empty memory: attention multiplies rows that were never written before it masks them, and NaN would remain.
    # The cache may outlive this call, and another may not be in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        grown = stored.new_zeros(rows, *stored.shape[1:])
        grown[: len(stored)] = stored
    return grown
