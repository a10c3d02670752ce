"""Attention of one step of generation: new prompts over themselves, and new tokens over their cached past.

A step is one row of tokens: whole prompts one after the other, then one token of each sequence that grows, then padding.
Dims: T tokens of the row, N growing sequences, H query heads, K key/value heads, D head_dim, S cached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from meshkit.algos.rollout._cache import KeyValueCache
from meshkit.models.layers import attention


@dataclass(eq=False)
class Past:
    """Growing sequences of similar length, next to each other in the row.

    pages: [N, pages] of each; what is beyond its length is any page of its own. lengths: [N], the new token included.
    """

    pages: Tensor
    lengths: Tensor
    longest: int
    _flat: Tensor = field(init=False)
    _shown: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._flat = self.pages.flatten()  # once, not in every layer

    def read(self, paged: Tensor) -> Tensor:
        """[N, S, K, D] of a layer's keys or values [pages, page_tokens, K, D]."""
        rows = paged.index_select(0, self._flat)
        return rows.view(self.pages.shape[0], -1, *rows.shape[2:])[:, : self.longest]

    def shown(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to scores [N, 1, 1, S]: 0 for the tokens that a sequence has and sees, else -inf."""
        if (window, dtype) not in self._shown:
            place_S = torch.arange(self.longest, device=self.lengths.device)
            lengths_N1 = self.lengths.unsqueeze(-1)
            seen = place_S < lengths_N1
            if window is not None:
                seen &= place_S >= lengths_N1 - window
            added = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self._shown[window, dtype] = added[:, None, None]
        return self._shown[window, dtype]


class PagedAttention:
    """A mask that keeps the keys and values it sees; see `meshkit.models.layers.SplitAttention`. One for each step.

    slots: [T without padding], where in the cache each token of the row goes. prompts: lengths of those that begin. past: of
    the sequences that grow. Not a dataclass: FSDP would take it apart to cast and move what is inside.
    """

    def __init__(
        self, cache: KeyValueCache, slots: Tensor, prompts: Sequence[int] = (), past: Sequence[Past] = ()
    ) -> None:
        self.cache, self.slots, self.prompts, self.past = cache, slots, prompts, past
        self._layer = 0  # layers attend once a step, in one order

    def windowed(self, window: int | None) -> PagedAttention | _Windowed:
        return self if window is None else _Windowed(self, window)

    def attend(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKD: Tensor,
        *,
        window: int | None = None,
    ) -> Tensor:
        """softmax(q k' / sqrt(D)) v of the row's tokens, each over what its own sequence has so far; padding is 0.

        q: [1, T, H, D]; k, v: [1, T, K, D]. Returns [1, T, H, D].
        """
        real, tokens = self.slots.shape[0], q_BTHD.shape[1]
        keys, values = self.cache.write(self._layer, self.slots, k_BTKD[0, :real], v_BTKD[0, :real])
        self._layer += 1
        if not q_BTHD.shape[2]:  # with more ranks of tp than heads
            return torch.zeros_like(q_BTHD)
        outs, start = [], 0
        for length in self.prompts:
            row = slice(start, start + length)
            outs.append(_over_itself(q_BTHD[:, row], k_BTKD[:, row], v_BTKD[:, row], window))
            start += length
        for past in self.past:
            row = slice(start, start + past.lengths.shape[0])
            outs.append(_over_past(q_BTHD[0, row], keys, values, past, window).unsqueeze(0))
            start += past.lengths.shape[0]
        if start < tokens:
            outs.append(torch.zeros_like(q_BTHD[:, start:]))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


class _Windowed:
    """The same with a sliding window."""

    def __init__(self, whole: PagedAttention, window: int) -> None:
        self._whole, self._window = whole, window

    def windowed(self, window: int | None) -> PagedAttention | _Windowed:
        return self if window is None else self._whole.windowed(min(window, self._window))

    def attend(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        return self._whole.attend(q_BTHD, k_BTKD, v_BTKD, window=self._window)


def _over_itself(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, window: int | None) -> Tensor:
    """A prompt: causal, by the attention of training."""
    tokens, shown = q_BTHD.shape[1], None
    if window is not None and window < tokens:
        place = torch.arange(tokens, device=q_BTHD.device)
        back = place.unsqueeze(-1) - place
        shown = (back >= 0) & (back < window)
    return attention(q_BTHD, k_BTKD, v_BTKD, shown)


def _over_past(q_NHD: Tensor, keys: Tensor, values: Tensor, past: Past, window: int | None) -> Tensor:
    """One token of each sequence. Query heads of one key/value head stand in the place of tokens: nothing repeats keys."""
    q_NKGD = q_NHD.unflatten(1, (keys.shape[2], -1))
    k_NKSD, v_NKSD = (past.read(paged).transpose(1, 2) for paged in (keys, values))
    out_NKGD = F.scaled_dot_product_attention(q_NKGD, k_NKSD, v_NKSD, attn_mask=past.shown(window, q_NHD.dtype))
    return out_NKGD.flatten(1, 2)
