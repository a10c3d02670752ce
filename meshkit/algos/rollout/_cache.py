"""KV cache: keys and values of the tokens so far, in pages that sequences take as they grow, share, and give back.

Dims: S slots (pages x page_tokens), K key/value heads, D head_dim.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from meshkit.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class CachePolicy:
    """How much of a rank's memory generation takes.

    page_tokens: tokens of a page, the unit in which sequences take memory. max_tokens: the cache's bound, beyond which
    answers wait for others to end; None lets it grow. max_sequences: answers that grow at the same time. prefill_tokens: of
    prompts that begin in one step, where there are several.
    keep_parameters: gather parameters once for the whole call, in place of once for every step.
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
    """Who uses which page: counts only. The first free page is taken first, so that few are ever touched."""

    def __init__(self) -> None:
        self._users: list[int] = []
        self._free: list[int] = []

    @property
    def ever(self) -> int:
        """Pages that have ever been in use: what the cache has room for."""
        return len(self._users)

    @property
    def used(self) -> int:
        return len(self._users) - len(self._free)

    def take(self) -> int:
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
    """The keys and values of the layers of this rank, by page. Layers are known by the order in which they attend."""

    GROWTH = 1.25  # room is made ahead: each time that there is too little, all of a layer is copied

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens, self.pages = page_tokens, Pages()
        self._layers: list[tuple[Tensor, Tensor]] = []

    def write(self, layer: int, slots: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Put tokens into their slots; returns the layer's keys and values, each [pages, page_tokens, K, D]."""
        if layer == len(self._layers):
            self._layers.append((_room(k_TKD, 0), _room(v_TKD, 0)))
        pages, kept = self.pages.ever, self._layers[layer]
        if len(kept[0]) < pages * self.page_tokens:
            size = int(pages * (self.GROWTH if len(kept[0]) else 1.0)) * self.page_tokens
            kept = self._layers[layer] = (_grown(kept[0], size), _grown(kept[1], size))
        for whole, new in zip(kept, (k_TKD, v_TKD), strict=True):
            whole.index_copy_(0, slots, new)
        return self._paged(kept[0]), self._paged(kept[1])

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Whole pages, in all layers."""
        if not sources:
            return
        for pair in self._layers:
            for whole in pair:
                pages = self._paged(whole)
                pages[targets] = pages[sources]

    def _paged(self, whole_SKD: Tensor) -> Tensor:
        return whole_SKD.view(len(whole_SKD) // self.page_tokens, self.page_tokens, *whole_SKD.shape[1:])


def _room(like_TKD: Tensor, slots: int) -> Tensor:
    # Zeros: what was never written is masked out after it was multiplied, and may not be NaN.
    return torch.zeros((slots, *like_TKD.shape[1:]), dtype=like_TKD.dtype, device=like_TKD.device)


def _grown(whole_SKD: Tensor, slots: int) -> Tensor:
    grown = _room(whole_SKD, slots)
    grown[: len(whole_SKD)] = whole_SKD
    return grown
