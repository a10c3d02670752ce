"""A mask whose tokens are split over ranks: what a model hands to attention in place of a plain one."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core.collectives import join_dim
from meshkit.core.linear_attention import linear_attention
from meshkit.core.masked_attention import mask_table
from meshkit.core.sharding import even_part
from meshkit.core.short_convolution import short_convolution
from meshkit.core.to_device import to_device
from meshkit.errors import PlanError
from meshkit.parallel.context._attention import context_attention, ulysses_to_heads, ulysses_to_tokens
from meshkit.parallel.context._layout import Layout
from meshkit.parallel.context._mixers import context_linear_attention, context_short_convolution
from meshkit.parallel.context._pattern import Pattern
from meshkit.parallel.context._pieces import halo_of, pieces_of
from meshkit.parallel.context._sparse_attention import block_counts, context_sparse_attention
from meshkit.parallel.context._ulysses import heads_of, kv_heads_read, regroup


def token_index(layout: Layout, rank: int) -> tuple[Tensor, int]:
    """(global token of each local place, [L], where padding repeats token 0; how many places are no padding)."""
    pieces = [torch.arange(first, after) for first, after in layout.runs[rank]]
    real = torch.cat([*pieces, torch.empty(0, dtype=torch.int64)])
    return F.pad(real, (0, layout.lengths[rank] - len(real))), len(real)


class SplitMask:
    """Which tokens see which, and which rank holds them. One per batch, made by `split_batch`.

    tokens: this rank's, padding included. rows: how many rows the batch had before they were laid end to end, or 0 where
    each row is split alike. given: the names of the batch that was split. batch_rows: its rows, where some of it is
    whole. has_rows: False where documents of several rows lie end to end. Not a dataclass: FSDP casts and moves the fields
    of dataclasses among a module's inputs.
    """

    def __init__(
        self,
        layout: Layout,
        axis: DeviceMesh,
        *,
        rows: int = 0,
        given: frozenset[str] = frozenset(),
        batch_rows: int | None = None,
        has_rows: bool = True,
    ) -> None:
        self.has_rows = has_rows
        self.layout, self.axis, self.rows, self.given, self.batch_rows = layout, axis, rows, given, batch_rows
        self.rank = axis.get_local_rank()
        self.group = axis.get_group().group_name
        self.table = layout.table()  # on the host, where the operators read it without a sync
        self.tokens = layout.lengths[self.rank]
        self.ulysses = layout.ulysses
        self.part = self.rank % self.ulysses  # among the ranks of the group, which trade heads for tokens
        self.group_tokens = layout.group_length(self.rank // self.ulysses)
        self.blocks = block_counts(layout, self.rank) if layout.sparse is not None else []
        self._followed: dict[Pattern, SplitMask] = {}
        # Of recurrent mixers: how many pieces of documents this rank has, and how many tokens of others it reads, by width.
        self._pieces: int | None = None
        self._halos: dict[int, int] = {}

    def plan_mixers(self, widths: Collection[int]) -> None:
        """Count what recurrent mixers get from other ranks now, for a graph of torch.compile cannot hold how it is counted.

        widths: of their short convolutions.
        """
        self._pieces = sum(piece.rank == self.rank for piece in pieces_of(self.layout))
        self._halos = {width: halo_of(self.layout, self.rank, width).received for width in widths}

    @property
    def only_padding(self) -> bool:
        """Whether this rank has no token of the batch."""
        return not self.layout.runs[self.rank]

    @cached_property
    def fills_up(self) -> bool:
        """Whether some rank has padding beside tokens of the batch."""
        real = [sum(after - first for first, after in runs) for runs in self.layout.runs]
        return any(0 < own < length for own, length in zip(real, self.layout.lengths, strict=True))

    @property
    def row_tokens(self) -> int:
        """Tokens of a row of the batch, on all ranks together."""
        return self.layout.mask.tokens // (self.rows or 1)

    def windowed(self, window: int | None) -> SplitMask:
        """The same split of the mask cut by a sliding window."""
        return self._cut(Pattern(causal=False, window=window))

    def following(self, pattern: Pattern, who: str) -> SplitMask:
        """The same split of what a layer sees of the mask. Raises: PlanError for one of the other direction."""
        whole = self.layout.mask
        # Where every token sees itself alone, which is an empty microbatch, both directions are the same.
        if len(whole.components) != whole.tokens and pattern.causal == whole.sees_ahead:
            raise PlanError(
                f"context parallelism: {who} attends with is_causal={pattern.causal}, but the batch was split for a mask "
                f"that is {'not causal' if whole.sees_ahead else 'causal'}. Give split_batch the mask that the module means, "
                "for example mask=Mask.full(tokens)."
            )
        return self._cut(pattern)

    def _cut(self, pattern: Pattern) -> SplitMask:
        if not pattern.cuts:
            return self
        # Kept: a model of many layers asks in each, and a new table would be planned and copied anew.
        if pattern not in self._followed:
            layout = self.layout.seen_by(pattern, self.row_tokens)
            self._followed[pattern] = SplitMask(
                layout,
                self.axis,
                rows=self.rows,
                given=self.given,
                batch_rows=self.batch_rows,
                has_rows=self.has_rows,
            )
        return self._followed[pattern]

    def attend(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """softmax(scale q k') v over the keys of all ranks that the mask shows; query head h reads key head h // (H/K).

        q: [B, T, H, D]; k: [B, T, K, D]; v: [B, T, K, E]: this rank's tokens. Returns [B, T, H, E]; rows that see nothing
        are 0. scale: default 1 / sqrt(D). softcap: scores become softcap * tanh(score / softcap). sinks: [H], one more
        score of each row, whose value is zero. Wire: what `explain` says for the layout's scheme; where E is not D, the
        narrower of them is sent as wide as the other.
        Raises: PlanError for shapes that do not fit the split.
        """
        narrow, scale = v_BTKE.shape[3], q_BTHD.shape[3] ** -0.5 if scale is None else scale
        q, k, v = equally_wide(q_BTHD, k_BTKD, v_BTKE)
        return self._attend(q, k, v, scale, softcap or 0.0, sinks)[..., :narrow]

    def _attend(
        self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, scale: float, softcap: float, sinks: Tensor | None
    ) -> Tensor:
        heads, kv_heads, head_dim = q_BTHD.shape[2], k_BTKD.shape[2], q_BTHD.shape[3]
        if q_BTHD.shape[1] != self.tokens or k_BTKD.shape[1] != self.tokens:
            raise PlanError(
                f"context parallelism: this rank holds {self.tokens} tokens, but attention got queries of "
                f"{q_BTHD.shape[1]} and keys of {k_BTKD.shape[1]}. Give the model the batch of split_batch whole."
            )
        if heads % kv_heads or v_BTKD.shape != k_BTKD.shape or k_BTKD.shape[3] != head_dim:
            raise PlanError(
                f"context parallelism: queries {tuple(q_BTHD.shape)}, keys {tuple(k_BTKD.shape)} and values "
                f"{tuple(v_BTKD.shape)} do not fit. Query heads are a multiple of key/value heads, and all have one head_dim."
            )
        output: Tensor
        if self.blocks:
            output = context_sparse_attention(
                q_BTHD, k_BTKD, v_BTKD, self.table, self.blocks, self.group, scale, softcap, sinks
            )[0]
            return output
        if self.ulysses == 1:
            output = context_attention(q_BTHD, k_BTKD, v_BTKD, self.table, self.group, scale, softcap, sinks)[0]
            return output
        q_heads = len(even_part(heads, self.ulysses, self.part))
        k_heads = len(kv_heads_read(self.part, self.ulysses, heads, kv_heads))
        local_heads = len(heads_of(self.part, self.ulysses, heads, kv_heads))
        # One tensor, so that queries, keys and values travel in one all-to-all.
        joined = torch.cat((q_BTHD, k_BTKD, v_BTKD), dim=2)
        traded = ulysses_to_heads(joined, self.table, self.group, heads, kv_heads, self.group_tokens, local_heads)
        q, k, v = traded.split([q_heads, k_heads, k_heads], dim=2)
        read = regroup(self.part, self.ulysses, heads, kv_heads)
        if read is not None:
            k, v = _heads(k, read), _heads(v, read)
        if sinks is not None:
            own = even_part(heads, self.ulysses, self.part)
            sinks = sinks[own.start : own.stop]
        out, _ = context_attention(q, k, v, self.table, self.group, scale, softcap, sinks)
        output = ulysses_to_tokens(out, self.table, self.group, heads, 0, self.tokens, heads)
        return output

    def linear_attention(
        self, q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, log_decay_BTH: Tensor, beta_BTH: Tensor | None
    ) -> Tensor:
        """`meshkit.core.linear_attention` of this rank's tokens, with the states that come from the tokens of other ranks.

        Returns [B, T, H, V]; of padding zeros. Wire: one state [B, H, K, V] in fp32 (fp64 for fp64) for each place where a
        document goes on on another rank: (cp - 1) states of one contiguous document; in backward as many gradients.
        Raises: PlanError for a mask that is no more than packed causal documents.
        """
        self._refuse_other_tokens(q_BTGK)
        if self._pieces is None:
            self.plan_mixers(())
        inputs = q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, beta_BTH
        out: Tensor = context_linear_attention(*inputs, self.table, self.group, self._pieces)[0]
        return out

    def short_convolution(self, x_BTC: Tensor, weight_CW: Tensor) -> Tensor:
        """`meshkit.core.short_convolution` of this rank's tokens, which read up to W - 1 tokens of other ranks (a halo).

        Returns [B, T, C]; of padding zeros. Wire: those tokens, and in backward their gradients. Raises: PlanError, as
        `linear_attention`.
        """
        self._refuse_other_tokens(x_BTC)
        if (width := weight_CW.shape[1]) not in self._halos:
            self.plan_mixers({width, *self._halos})
        out: Tensor = context_short_convolution(x_BTC, weight_CW, self.table, self.group, self._halos[width])[0]
        return out

    def _refuse_other_tokens(self, x: Tensor) -> None:
        if x.shape[1] != self.tokens:
            raise PlanError(
                f"context parallelism: this rank holds {self.tokens} tokens, but a mixer got {x.shape[1]}. Give the model "
                "the batch of split_batch whole."
            )

    def join(self, values: Tensor) -> Tensor:
        """Gather values of this rank's tokens [B, T, ...] to those of all tokens [rows, tokens, ...], the same on every rank.

        For losses over whole sequences, log-probabilities and generation. Differentiable if every rank then computes the
        same from the result. Wire: one all-gather, padded to the longest rank.
        Raises: PlanError with dynamic groups, whose microbatches have no rows.
        """
        if not self.has_rows:
            raise PlanError(
                "context parallelism: a loss joins the tokens of whole rows, but with dynamic groups a microbatch has "
                "documents of several. Use ContextPolicy(groups='fixed'), or a loss that is a sum over tokens."
            )
        return self.in_order(join_dim(self.padded(values), 1, self.axis))

    def padded(self, values: Tensor) -> Tensor:
        """[B, T, ...] with as many tokens as the longest rank has."""
        return F.pad(values, (0, 0) * (values.ndim - 2) + (0, max(self.layout.lengths) - self.tokens))

    def in_order(self, gathered: Tensor) -> Tensor:
        """All ranks' padded tokens, rank after rank, as the rows of the batch."""
        if self._places.device != gathered.device:  # once for all layers
            self._places = to_device(self._places, gathered.device)
        joined = gathered.index_select(1, self._places)
        return rearrange(joined, "1 (b t) ... -> b t ...", b=self.rows) if self.rows else joined

    def own(self, values: Tensor) -> Tensor:
        """Of all tokens [rows, tokens, ...] this rank's, where padding repeats token 0."""
        flat = rearrange(values, "b t ... -> 1 (b t) ...") if self.rows else values
        if self._index.device != values.device:
            self._index = to_device(self._index, values.device)
        return flat.index_select(1, self._index)

    @property
    def real_tokens(self) -> int:
        """This rank's tokens without what fills it up, which comes last."""
        return sum(after - first for first, after in self.layout.runs[self.rank])

    @cached_property
    def positions(self) -> Tensor:
        """[T]: of this rank's tokens in their rows; on the host. What fills it up counts as the first token."""
        return token_index(self.layout, self.rank)[0] % self.row_tokens

    @cached_property
    def table_of_all(self) -> Tensor:
        """Of attention on all tokens."""
        return self.layout.on_one_rank().table()

    @cached_property
    def _places(self) -> Tensor:
        """Of each token, where it is among those of all ranks, rank after rank."""
        layout = self.layout
        index = torch.empty(layout.mask.tokens, dtype=torch.int64)
        for rank, runs in enumerate(layout.runs):
            start = rank * max(layout.lengths)
            for first, after in runs:
                index[first:after] = torch.arange(start, start + after - first)
                start += after - first
        return index

    @cached_property
    def _index(self) -> Tensor:
        return token_index(self.layout, self.rank)[0]


class AllTokens:
    """A split mask inside of a module that runs on all tokens: every rank attends to all of them by itself."""

    def __init__(self, split: SplitMask) -> None:
        self.split = split

    def windowed(self, window: int | None) -> AllTokens:
        return AllTokens(self.split.windowed(window))

    def following(self, pattern: Pattern, who: str) -> AllTokens:
        return AllTokens(self.split.following(pattern, who))

    def attend(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `SplitMask.attend`, of all tokens. No communication."""
        split, narrow = self.split, v_BTKE.shape[3]
        scale = q_BTHD.shape[3] ** -0.5 if scale is None else scale
        q, k, v = equally_wide(q_BTHD, k_BTKD, v_BTKE)
        q, k, v = (self._stream(each) for each in (q, k, v))
        out: Tensor = context_attention(q, k, v, split.table_of_all, split.group, scale, softcap or 0.0, sinks)[0]
        return self._rows(out)[..., :narrow]

    def linear_attention(
        self, q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, log_decay_BTH: Tensor, beta_BTH: Tensor | None
    ) -> Tensor:
        """As `SplitMask.linear_attention`, of all tokens. No communication."""
        inputs = (q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, beta_BTH)
        streams = (None if each is None else self._stream(each) for each in inputs)
        out: Tensor = linear_attention(*streams, mask_table(self.split.layout.mask))
        return self._rows(out)

    def short_convolution(self, x_BTC: Tensor, weight_CW: Tensor) -> Tensor:
        """As `SplitMask.short_convolution`, of all tokens. No communication."""
        out: Tensor = short_convolution(self._stream(x_BTC), weight_CW, mask_table(self.split.layout.mask))
        return self._rows(out)

    def _stream(self, x: Tensor) -> Tensor:
        return rearrange(x, "b t ... -> 1 (b t) ...") if self.split.rows else x

    def _rows(self, x: Tensor) -> Tensor:
        return rearrange(x, "1 (b t) ... -> b t ...", b=self.split.rows) if self.split.rows else x


def _heads(x_BTKD: Tensor, read: list[int]) -> Tensor:
    """Of views: an index would have to be copied to the device."""
    heads = x_BTKD.unbind(2)
    return torch.stack([heads[index] for index in read], dim=2)


def equally_wide(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values as wide as the wider of them, for they travel in one message; the zeros change no score."""
    wide, narrow = q.shape[3], v.shape[3]
    if wide == narrow or k.shape[3] != wide:
        return q, k, v
    q, k, v = (F.pad(each, (0, max(wide, narrow) - each.shape[3])) for each in (q, k, v))
    return q, k, v
