"""Paged attention of one generation step: prefill (a prompt over itself and what its cache knows) and decode (a new token).

A step is one row of tokens: prompts one after the other, then one token of each growing sequence, then padding.
Dims: T tokens of the row, N growing sequences, H query heads, K key/value heads, D head_dim, S cached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from meshkit.algos.rollout._cache import KeyValueCache, Places
from meshkit.models.layers import attention


@dataclass(frozen=True, eq=False)
class Begun:
    """A prompt in the row. tokens: those in the row. known: those before them, in the cache. pages: of both, if known."""

    tokens: int
    known: int = 0
    pages: Tensor | None = None


@dataclass(frozen=True)
class SideBySide:
    """Sequences in a block, with `stride` slots for each, from the slot `first` on. They are read where they are."""

    rows: int
    first: int
    stride: int

    def read(self, stored: Tensor, heads: int, tokens: slice) -> Tensor:
        """[N, K, tokens, D] of a layer's keys or values [S * K, D]."""
        size = stored.shape[1]
        of_head = self.stride * size
        return stored.as_strided(
            (self.rows, heads, tokens.stop - tokens.start, size),
            (heads * of_head, of_head, size, 1),
            (self.first * heads + tokens.start) * size,
        )


class Apart:
    """Sequences in pages anywhere. pages: [N, pages] of each; beyond its length, its last page again. They are copied to be
    read.
    """

    def __init__(self, pages: Tensor, page_tokens: int) -> None:
        self.rows, self._page_tokens = pages.shape[0], page_tokens
        self._flat = pages.flatten()  # once, not in every layer

    def read(self, stored: Tensor, heads: int, tokens: slice) -> Tensor:
        """As of `SideBySide`."""
        pages = stored.view(-1, self._page_tokens, heads, stored.shape[1]).index_select(0, self._flat)
        return pages.view(self.rows, -1, *pages.shape[2:])[:, tokens].transpose(1, 2)


class Past:
    """Growing sequences of similar length, next to each other in the row. lengths: of each, with the new token."""

    def __init__(self, places: SideBySide | Apart, lengths: Sequence[int], device: torch.device) -> None:
        self.places, self.rows, self.longest = places, len(lengths), max(lengths)
        # Sequences of one length see all that is read, and need no bias.
        self._lengths_N1 = None if min(lengths) == self.longest else torch.tensor(lengths).unsqueeze(1).to(device)
        self._biases: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def go_on(self) -> None:
        """Each sequence has one more token."""
        self.longest += 1
        if self._lengths_N1 is not None:
            self._lengths_N1 = self._lengths_N1 + 1
            self._biases = {}

    def seen(self, window: int | None, dtype: torch.dtype) -> tuple[slice, Tensor | None]:
        """(tokens to read, the attention bias of them [N, 1, 1, tokens]: 0 where a sequence has and sees one, else -inf)."""
        if self._lengths_N1 is None:
            return slice(0 if window is None else max(0, self.longest - window), self.longest), None
        if (window, dtype) not in self._biases:  # made once a step
            position_S = torch.arange(self.longest, device=self._lengths_N1.device)
            hidden_NS = position_S >= self._lengths_N1
            if window is not None:
                hidden_NS |= position_S < self._lengths_N1 - window
            bias_NS = torch.zeros(hidden_NS.shape, dtype=dtype, device=hidden_NS.device)
            self._biases[window, dtype] = bias_NS.masked_fill_(hidden_NS, -torch.inf)[:, None, None]
        return slice(0, self.longest), self._biases[window, dtype]


class PagedAttention:
    """The `mask` argument of a model in generation: attention that stores keys and values in the KV cache, for a step.

    places: [T without padding], where in the cache each token of the row goes. prompts: those that begin. past: the
    growing sequences, in blocks. See `meshkit.models.layers.SplitAttention` for the protocol.
    """

    # Not a dataclass: FSDP walks through dataclasses among a forward's inputs, to cast and move the tensors in them.

    def __init__(
        self, cache: KeyValueCache, places: Places, prompts: Sequence[Begun] = (), past: Sequence[Past] = ()
    ) -> None:
        self.cache, self.places, self.prompts, self.past = cache, places, prompts, past
        self.tokens = places.start.shape[0]
        self._rows: dict[int, Tensor] = {}
        self._layer = 0  # counts calls: layers attend once a step, always in the same order

    def go_on(self) -> None:
        """The next step of sequences that all are in blocks, where the next token of each has the next place."""
        self.places = self.places._replace(offset=self.places.offset + 1)
        self._rows = {heads: rows + 1 for heads, rows in self._rows.items()}
        self._layer = 0
        for past in self.past:
            past.go_on()

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
        # See [Note: views where a token is drawn].
        q_THD, k_TKD, v_TKD = q_BTHD[0], k_BTKD[0], v_BTKD[0]
        tokens, heads = q_THD.shape[0], k_TKD.shape[1]
        if heads not in self._rows:
            self._rows[heads] = self.places.rows(heads)
        if self.tokens < tokens:
            k_TKD, v_TKD = k_TKD[: self.tokens], v_TKD[: self.tokens]
        keys, values = self.cache.write(self._layer, self._rows[heads], k_TKD, v_TKD)
        self._layer += 1
        if not q_THD.shape[1]:  # a rank without heads: tp is larger than their number
            return torch.zeros_like(q_BTHD)
        outs, start = [], 0
        for begun in self.prompts:
            row = slice(start, start + begun.tokens)
            if begun.pages is None:
                k_BSKD, v_BSKD = k_BTKD[:, row], v_BTKD[:, row]
            else:
                # Its own keys are there, too: they were written before any token attends.
                k_BSKD, v_BSKD = (_read(stored, heads, begun, self.cache.page_tokens) for stored in (keys, values))
            outs.append(_prefill(q_BTHD[:, row], k_BSKD, v_BSKD, window)[0])
            start += begun.tokens
        for past in self.past:
            outs.append(_decode(q_THD[start : start + past.rows], keys, values, heads, past, window))
            start += past.rows
        if start < tokens:
            outs.append(torch.zeros_like(q_THD[start:]))
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).unsqueeze(0)


class _Windowed:
    """`PagedAttention` with a sliding window."""

    def __init__(self, attention: PagedAttention, window: int) -> None:
        self._attention, self._window = attention, window

    def windowed(self, window: int | None) -> PagedAttention | _Windowed:
        return self if window is None else self._attention.windowed(min(window, self._window))

    def attend(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        return self._attention.attend(q_BTHD, k_BTKD, v_BTKD, window=self._window)


def _read(stored: Tensor, heads: int, begun: Begun, page_tokens: int) -> Tensor:
    """[1, S, K, D] of a layer's keys or values: a prompt's, known and new."""
    assert begun.pages is not None
    pages = stored.view(-1, page_tokens, heads, stored.shape[1]).index_select(0, begun.pages)
    return pages.flatten(0, 1)[None, : begun.known + begun.tokens]


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


def _decode(q_NHD: Tensor, keys: Tensor, values: Tensor, heads: int, past: Past, window: int | None) -> Tensor:
    """One new token of each sequence over its cached past."""
    tokens, bias = past.seen(window, q_NHD.dtype)
    # Each sequence has one query token, so the query heads of a key/value head take the dim of tokens: keys need no repeat.
    out_NKGD = F.scaled_dot_product_attention(
        q_NHD.unflatten(1, (heads, -1)),
        past.places.read(keys, heads, tokens),
        past.places.read(values, heads, tokens),
        attn_mask=bias,
    )
    return out_NKGD.flatten(1, 2)
