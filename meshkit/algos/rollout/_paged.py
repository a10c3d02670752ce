"""Paged attention of one generation step: prefill (a prompt over itself and what its cache knows) and decode (a new token).

A step is one row of tokens: prompts one after the other, then one token of each growing sequence, then padding.
Dims: T tokens of the row, N growing sequences, H query heads, K key/value heads, D head_dim, S cached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from meshkit.algos.rollout._cache import KeyValueCache
from meshkit.models.layers import attention


@dataclass(frozen=True, eq=False)
class Begun:
    """A prompt in the row. tokens: those in the row. known: those before them, in the cache. pages: of both, if known."""

    tokens: int
    known: int = 0
    pages: Tensor | None = None


@dataclass(eq=False)
class Past:
    """Growing sequences of similar length, next to each other in the row.

    pages: [N, pages] of each; beyond its length, its last page again. lengths: [N], with the new token. longest: of them.
    """

    pages: Tensor
    lengths: Tensor
    longest: int
    _flat: Tensor = field(init=False)
    _biases: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._flat = self.pages.flatten()  # once, not in every layer

    def read(self, paged: Tensor) -> Tensor:
        """[N, S, K, D] of a layer's keys or values [pages, page_tokens, K, D]."""
        rows = paged.index_select(0, self._flat)
        by_sequence = rearrange(rows, "(n pages) slots k d -> n (pages slots) k d", n=self.pages.shape[0])
        return by_sequence[:, : self.longest]

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """The attention bias [N, 1, 1, S]: 0 for the tokens that a sequence has and sees, else -inf. Made once a step."""
        if (window, dtype) not in self._biases:
            position_S = torch.arange(self.longest, device=self.lengths.device)
            lengths_N1 = rearrange(self.lengths, "n -> n 1")
            seen_NS = position_S < lengths_N1
            if window is not None:
                seen_NS &= position_S >= lengths_N1 - window
            bias_NS = torch.zeros(seen_NS.shape, dtype=dtype, device=seen_NS.device).masked_fill_(~seen_NS, -torch.inf)
            self._biases[window, dtype] = rearrange(bias_NS, "n s -> n 1 1 s")
        return self._biases[window, dtype]


class PagedAttention:
    """The `mask` argument of a model in generation: attention that stores keys and values in the KV cache. One for each step.

    slots: [T without padding], where in the cache each token of the row goes. prompts: those that begin. past: the
    growing sequences, in blocks. See `meshkit.models.layers.SplitAttention` for the protocol.
    """

    # Not a dataclass: FSDP walks through dataclasses among a forward's inputs, to cast and move the tensors in them.

    def __init__(
        self, cache: KeyValueCache, slots: Tensor, prompts: Sequence[Begun] = (), past: Sequence[Past] = ()
    ) -> None:
        self.cache, self.slots, self.prompts, self.past = cache, slots, prompts, past
        self._layer = 0  # counts calls: layers attend once a step, always in the same order

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
        """softmax(q k' / sqrt(D)) v of the row's tokens, each over its own sequence so far; padding gives 0.

        q: [1, T, H, D]; k, v: [1, T, K, D]. Returns [1, T, H, D].
        """
        real, tokens = self.slots.shape[0], q_BTHD.shape[1]
        keys, values = self.cache.write(self._layer, self.slots, k_BTKD[0, :real], v_BTKD[0, :real])
        self._layer += 1
        if not q_BTHD.shape[2]:  # a rank without heads: tp is larger than their number
            return torch.zeros_like(q_BTHD)
        outs, start = [], 0
        for begun in self.prompts:
            row = slice(start, start + begun.tokens)
            if begun.pages is None:
                k_BSKD, v_BSKD = k_BTKD[:, row], v_BTKD[:, row]
            else:
                # Its own keys are there, too: they were written before any token attends.
                k_BSKD, v_BSKD = (_read(paged, begun) for paged in (keys, values))
            outs.append(_prefill(q_BTHD[:, row], k_BSKD, v_BSKD, window))
            start += begun.tokens
        for past in self.past:
            row = slice(start, start + past.lengths.shape[0])
            outs.append(rearrange(_decode(q_BTHD[0, row], keys, values, past, window), "n h d -> 1 n h d"))
            start += past.lengths.shape[0]
        if start < tokens:
            outs.append(torch.zeros_like(q_BTHD[:, start:]))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


class _Windowed:
    """`PagedAttention` with a sliding window."""

    def __init__(self, attention: PagedAttention, window: int) -> None:
        self._attention, self._window = attention, window

    def windowed(self, window: int | None) -> PagedAttention | _Windowed:
        return self if window is None else self._attention.windowed(min(window, self._window))

    def attend(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        return self._attention.attend(q_BTHD, k_BTKD, v_BTKD, window=self._window)


def _read(paged: Tensor, begun: Begun) -> Tensor:
    """[1, S, K, D] of a layer's keys or values [pages, page_tokens, K, D]: a prompt's, known and new."""
    assert begun.pages is not None
    rows = rearrange(paged.index_select(0, begun.pages), "pages slots k d -> 1 (pages slots) k d")
    return rows[:, : begun.known + begun.tokens]


def _prefill(q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, window: int | None) -> Tensor:
    """The last T of S tokens over all of them: causal, by the attention of training."""
    new, tokens, seen_TS = q_BTHD.shape[1], k_BSKD.shape[1], None
    # Plain causal attention of a whole prompt has the fastest kernels; SDPA's own has the first query see the first key.
    if new < tokens or (window is not None and window < tokens):
        position = torch.arange(tokens, device=q_BTHD.device)
        distance_TS = rearrange(position[tokens - new :], "t -> t 1") - position
        seen_TS = distance_TS >= 0
        if window is not None:
            seen_TS &= distance_TS < window
    return attention(q_BTHD, k_BSKD, v_BSKD, seen_TS)


def _decode(q_NHD: Tensor, keys: Tensor, values: Tensor, past: Past, window: int | None) -> Tensor:
    """One new token of each sequence over its cached past."""
    # Each sequence has one query token, so the query heads of a key/value head take the dim of tokens: keys need no repeat.
    q_NKGD = rearrange(q_NHD, "n (k g) d -> n k g d", k=keys.shape[2])
    k_NKSD, v_NKSD = (rearrange(past.read(paged), "n s k d -> n k s d") for paged in (keys, values))
    out_NKGD = F.scaled_dot_product_attention(q_NKGD, k_NKSD, v_NKSD, attn_mask=past.bias(window, q_NHD.dtype))
    return rearrange(out_NKGD, "n k g d -> n (k g) d")
