"""Paged KV cache (PagedAttention): keys and values in pages that sequences take as they grow, share, and give back.

Dims: S slots (pages x page_tokens), K key/value heads, D head_dim.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

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
            if value is not None and value < 1:
                raise PlanError(f"CachePolicy({name}={value}): it must be at least 1.")

    @property
    def max_pages(self) -> int | None:
        return None if self.max_tokens is None else self.max_tokens // self.page_tokens

    def pages(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)


class Pages:
    """Reference counts of pages. The lowest free page is taken first, so that the cache stays small.

    At `limit` pages in use `evict` is asked to give one back before another is taken.
    """

    def __init__(self) -> None:
        self._users: list[int] = []
        self._free: list[int] = []
        self.limit: int | None = None
        self.evict: Callable[[], bool] = lambda: False

    @property
    def allocated(self) -> int:
        """The number of pages ever in use, for which the cache must have room."""
        return len(self._users)

    @property
    def used(self) -> int:
        return len(self._users) - len(self._free)

    def users(self, page: int) -> int:
        return self._users[page]

    def take(self) -> int:
        if self.limit is not None and self.used >= self.limit:
            self.evict()
        if not self._free:
            self._users.append(1)
            return len(self._users) - 1
        page = heapq.heappop(self._free)
        self._users[page] = 1
        return page

    def share(self, page: int) -> int:
        self._users[page] += 1
        return page

    def give_back(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            heapq.heappush(self._free, page)


class KeyValueCache:
    """The keys and values of this rank's layers, by page. A layer is identified by its place in the order of attention.

    choices: [S, R, K] int16, beside them the experts that routers chose, where they are recorded; see `meshkit.moe.ROUTING`.
    """

    GROWTH = 1.25  # room is made ahead, since making room copies all of a layer

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens, self.pages = page_tokens, Pages()
        self._layers: list[tuple[Tensor, Tensor]] = []
        self.choices: Tensor | None = None

    def write(self, layer: int, slots: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Put tokens into their slots; returns the layer's keys and values, each [pages, page_tokens, K, D]."""
        # Layers are created at their first call: how many, and with how many heads on this rank, only the model knows.
        if layer == len(self._layers):
            self._layers.append((_room(k_TKD, 0), _room(v_TKD, 0)))
        stored = self._with_room(layer)
        for stored_SKD, new_TKD in zip(stored, (k_TKD, v_TKD), strict=True):
            stored_SKD.index_copy_(0, slots, new_TKD)
        return self._paged(stored[0]), self._paged(stored[1])

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy pages, in all layers."""
        if not sources:
            return
        for layer in range(len(self._layers)):
            for stored_SKD in self._with_room(layer):
                pages = self._paged(stored_SKD)
                pages[targets] = pages[sources]
        if self.choices is not None:
            pages = self._paged(self._choices_with_room(self.choices))
            pages[targets] = pages[sources]

    def write_choices(self, slots: Tensor, routers: Tensor, choices_TrK: Tensor) -> None:
        """Put what this rank's routers chose beside the keys of these tokens."""
        assert self.choices is not None
        self._choices_with_room(self.choices)[slots.unsqueeze(1), routers] = choices_TrK

    def _choices_with_room(self, choices_SRK: Tensor) -> Tensor:
        slots = self.pages.allocated * self.page_tokens
        if len(choices_SRK) < slots:
            self.choices = choices_SRK = _grown(choices_SRK, int(self.pages.allocated * self.GROWTH) * self.page_tokens)
        return choices_SRK

    def _with_room(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the layer, with slots for all pages."""
        pages, stored = self.pages.allocated, self._layers[layer]
        if len(stored[0]) < pages * self.page_tokens:
            # Exact at first: a short call never pays for room ahead.
            size = int(pages * (self.GROWTH if len(stored[0]) else 1.0)) * self.page_tokens
            stored = self._layers[layer] = (_grown(stored[0], size), _grown(stored[1], size))
        return stored

    def _paged(self, stored_SKD: Tensor) -> Tensor:
        return rearrange(stored_SKD, "(pages slots) k d -> pages slots k d", slots=self.page_tokens)


def _room(like_TKD: Tensor, slots: int) -> Tensor:
    # Zeros, not empty memory: attention multiplies slots that were never written before it masks them, and NaN would remain.
    return torch.zeros((slots, *like_TKD.shape[1:]), dtype=like_TKD.dtype, device=like_TKD.device)


def _grown(stored_SKD: Tensor, slots: int) -> Tensor:
    grown = _room(stored_SKD, slots)
    grown[: len(stored_SKD)] = stored_SKD
    return grown
