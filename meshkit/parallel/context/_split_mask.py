"""A mask whose tokens are split over ranks: what a model hands to attention in place of a plain one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshkit.collectives import join_dim
from meshkit.errors import PlanError
from meshkit.parallel.context._attention import context_attention, ulysses_to_heads, ulysses_to_tokens
from meshkit.parallel.context._layout import Layout
from meshkit.parallel.context._ulysses import heads_of, kv_heads_read, regroup
from meshkit.sharding import even_part


class SplitMask:
    """Who sees whom, and which rank holds whom. One per batch, made by `split_batch`.

    tokens: this rank's, padding included. rows: how many rows the batch had before they were laid end to end, or 0 where
    each row is split alike. Not a dataclass: FSDP would take it apart to cast and move what is inside.
    """

    def __init__(self, layout: Layout, axis: DeviceMesh, *, rows: int = 0) -> None:
        self.layout, self.axis, self.rows = layout, axis, rows
        self.rank = axis.get_local_rank()
        self.group = axis.get_group().group_name
        self.table = layout.table()  # stays on the host, where operators read it
        self.tokens = layout.lengths[self.rank]
        self.ulysses = layout.ulysses
        self.part = self.rank % self.ulysses  # of the ranks that trade heads for tokens with this one
        self.group_tokens = layout.group_length(self.rank // self.ulysses)
        self._windowed: dict[int, SplitMask] = {}

    def windowed(self, window: int | None) -> SplitMask:
        """The same split of the mask cut by a sliding window."""
        if window is None:
            return self
        if window not in self._windowed:
            self._windowed[window] = SplitMask(self.layout.windowed(window), self.axis, rows=self.rows)
        return self._windowed[window]

    def attend(self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, *, scale: float | None = None) -> Tensor:
        """softmax(scale q k') v over the keys of all ranks that the mask shows; query head h reads key head h // (H/K).

        q: [B, T, H, D]; k, v: [B, T, K, D]: this rank's tokens. Returns [B, T, H, D]; rows that see nothing are 0.
        scale: default 1 / sqrt(D). Wire: what `explain` says for the layout's scheme.
        Raises: PlanError for shapes that do not fit the split.
        """
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
        scale = head_dim**-0.5 if scale is None else scale
        if self.ulysses == 1:
            whole: Tensor = context_attention(q_BTHD, k_BTKD, v_BTKD, self.table, self.group, scale)[0]
            return whole
        own = len(even_part(heads, self.ulysses, self.part))
        keys = len(kv_heads_read(self.part, self.ulysses, heads, kv_heads))
        held = len(heads_of(self.part, self.ulysses, heads, kv_heads))
        joined = torch.cat((q_BTHD, k_BTKD, v_BTKD), dim=2)
        traded = ulysses_to_heads(joined, self.table, self.group, heads, kv_heads, self.group_tokens, held)
        q, k, v = traded.split([own, keys, keys], dim=2)
        read = regroup(self.part, self.ulysses, heads, kv_heads)
        if read is not None:
            index = torch.tensor(read, device=k.device)
            k, v = k.index_select(2, index), v.index_select(2, index)
        out, _ = context_attention(q, k, v, self.table, self.group, scale)
        back: Tensor = ulysses_to_tokens(out, self.table, self.group, heads, 0, self.tokens, heads)
        return back

    def join(self, values: Tensor) -> Tensor:
        """Values of this rank's tokens [B, T, ...] -> those of all tokens [rows, tokens, ...], the same on every rank.

        For losses over whole sequences, log-probabilities and generation. Differentiable, for a result that every rank
        uses the same way. Wire: one all-gather, padded to the longest rank.
        """
        layout = self.layout
        longest = max(layout.lengths)
        padded = torch.nn.functional.pad(values, (0, 0) * (values.ndim - 2) + (0, longest - self.tokens))
        gathered = join_dim(padded, 1, self.axis)
        place = torch.empty(layout.mask.tokens, dtype=torch.int64)
        for rank, runs in enumerate(layout.runs):
            start = rank * longest
            for first, after in runs:
                place[first:after] = torch.arange(start, start + after - first)
                start += after - first
        whole = gathered.index_select(1, place.to(values.device))
        return whole.unflatten(1, (self.rows, -1)).squeeze(0) if self.rows else whole
