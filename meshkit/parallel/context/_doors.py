"""How a model's attention is reached, and what of its code is changed so that it follows a split of the tokens."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from meshkit.core.patch_class import patch_class
from meshkit.parallel.context._by_hand import masks_of_own_rows
from meshkit.parallel.context._cache import with_cache
from meshkit.parallel.context._counted import Counted, wide
from meshkit.parallel.context._foreign import (
    follow_patterns,
    is_transformers,
    use_masks,
    use_registry,
    with_attention_intercepted,
    with_mask_set,
)
from meshkit.parallel.context._pattern import Pattern
from meshkit.parallel.context._whole import Whole


@dataclass(frozen=True)
class Attention:
    """A call of attention, of all heads. width: of a head, the wider of keys and values."""

    module: str
    heads: int
    kv_heads: int
    width: int
    pattern: Pattern


@dataclass(frozen=True)
class Mixer:
    """A call of a recurrent mixer, of all heads: a scan with states [heads, key_size, value_size], or a short convolution of
    `channels` over `width` tokens, whichever is not 0. trains: whether a gradient goes through it."""

    module: str
    trains: bool
    state: tuple[int, int, int] = (0, 0, 0)
    channels: int = 0
    width: int = 0


@dataclass(frozen=True)
class Sent:
    """A message of a line. gather: every rank gathers the tokens of a tensor; else a sum over them is summed over the ranks.
    elements: of a token that is gathered, of a row's sum. trains: whether its gradient is scattered, or summed, too. one_row:
    whether it is of one row, however many the batch has."""

    gather: bool
    elements: int
    dtype: torch.dtype
    trains: bool
    one_row: bool = False

    def size(self, rows: int, tokens: int, compute: torch.dtype) -> int:
        """Bytes of the gathered tensor, or of the sum. tokens: of the longest rank, times the ranks."""
        rows = 1 if self.one_row else rows
        if not self.gather:
            return rows * self.elements * wide(compute).itemsize
        return rows * tokens * self.elements * (compute if self.dtype.is_floating_point else self.dtype).itemsize


@dataclass(frozen=True)
class Doors:
    """How a model's attention is reached. registry: transformers'. intercepted: modules whose calls of
    scaled_dot_product_attention are ours. patterns: what the attention of modules of the registry sees. cached: the model
    attends by itself to what a cache gives back. None of them: the forward takes `mask`. whole: modules that run on all
    tokens, on every rank. counted: lines of modules that are about all tokens. sent: what a forward sends there, by
    module. positions: whether position_ids of the split are handed to a model that could count them itself. calls: of
    attention, in order, where it was read. mixers: calls of recurrent mixers."""

    registry: bool = False
    intercepted: tuple[str, ...] = ()
    patterns: Mapping[str, Pattern] = field(default_factory=dict)
    whole: Mapping[str, Whole] = field(default_factory=dict)
    counted: Mapping[str, Counted] = field(default_factory=dict)
    cached: bool = False
    sent: Mapping[str, tuple[Sent, ...]] = field(default_factory=dict)
    positions: bool = True
    calls: tuple[Attention, ...] | None = None
    mixers: tuple[Mixer, ...] = ()

    @property
    def attends(self) -> bool:
        """Whether some layer has attention, as far as is known: else tokens are split for recurrent mixers alone."""
        return bool(self.calls) or not self.mixers

    @property
    def window(self) -> int | None:
        """The sliding window that all layers have, where they were read and share one."""
        windows = {call.pattern.window for call in self.calls or ()}
        return windows.pop() if len(windows) == 1 else None

    @property
    def by_hand(self) -> bool:
        """Whether the model's own code computes with pairs of tokens: a rank's own with all."""
        return self.cached or any(each.by_hand for each in self.counted.values())

    @property
    def key(self) -> Hashable:
        """The same of doors that change a module alike."""
        counted = sorted((name, sorted(each.calls.items())) for name, each in self.counted.items())
        return self.registry, self.intercepted, repr((self.patterns, self.whole, counted)), self.cached, self.positions

    def open(self, module: nn.Module) -> None:
        """Let the module's attention follow the split mask that its forward is given."""
        modules = dict(module.named_modules())
        for name in self.intercepted:
            patch_class(modules[name], forward=with_attention_intercepted(type(modules[name]).forward))
        if self.registry:
            use_registry(module)
            follow_patterns(module, self.patterns)
        takes = {"mask", "position_ids"} <= inspect.signature(module.forward).parameters.keys()
        for counted in self.counted.values():
            counted.open(module)
        for each in self.whole.values():
            each.open(module)
        makes_masks = self.by_hand and not self.registry and is_transformers(module)
        if makes_masks:
            use_masks(masks_of_own_rows)
        if self != Doors(calls=self.calls, mixers=self.mixers) or not takes:
            hand_on = self.registry and bool(getattr(module, "_supports_attention_backend", False))
            forward = with_mask_set(
                with_cache(type(module).forward) if self.cached else type(module).forward,
                hand_on=hand_on,
                positions=self.positions,
                makes_masks=makes_masks,
            )
            patch_class(module, forward=forward)
