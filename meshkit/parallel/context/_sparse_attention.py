"""Sparse attention over ranks as a custom operator: blocks of keys that queries chose travel to them, and to nobody else.

Dims: B batch, T tokens of this rank, H query heads, K key/value heads, D head_dim, P ranks, Q own blocks, N all blocks. A
message is (k, v) of the chosen tokens [2, tokens, D] in the compute dtype, its gradient one of the accumulator's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshkit.core.attention_kernels import Backward, Forward, accumulator_dtype, sinks_gradient, with_sinks
from meshkit.core.attention_tiles import HeadTiles
from meshkit.core.custom_op import custom_op
from meshkit.core.double_backward import once_differentiable
from meshkit.core.to_device import HOST, to_device
from meshkit.parallel.context._blocks import blocks_of, places_sent
from meshkit.parallel.context._choose_blocks import choose_blocks
from meshkit.parallel.context._head_tiles import head_tiles, tile_table, visible_in
from meshkit.parallel.context._layout import Layout, layout_of
from meshkit.parallel.context._ring_group import NOTHING, RingGroup, ring_group_of


@dataclass(frozen=True, kw_only=True)
class ChosenBlocks:
    """What one call of sparse attention chose. chosen: [B, H, Q, N] of this rank's queries; needed: [P, B, K, N] of each
    rank, on the host; bool. pairs: visible ones of query and key, of all rows and heads of this rank. backward: of a
    backward, which sends the same keys once more, and their gradients."""

    layout: Layout
    rank: int
    chosen: Tensor
    needed: Tensor
    pairs: int
    backward: bool


_watching: list[list[ChosenBlocks]] = []


@contextmanager
def watching_choices() -> Iterator[list[ChosenBlocks]]:
    """Inside, what sparse attention chooses on this rank, call by call: its visible pairs, and who needs which keys."""
    found: list[ChosenBlocks] = []
    _watching.append(found)
    try:
        yield found
    finally:
        _watching.remove(found)


def _tell(layout: Layout, rank: int, chosen: Tensor, needed: Tensor, counted: Tensor, *, backward: bool) -> None:
    for found in _watching:
        pairs = visible_in(counted, tile_table(layout, rank, chosen.device))
        found.append(
            ChosenBlocks(
                layout=layout,
                rank=rank,
                chosen=chosen.clone(),
                needed=needed.clone(),
                pairs=pairs,
                backward=backward,
            )
        )


# --------------------------------------------------------------------------------------------------------- messages


def _cast(kv: Tensor, needed: Tensor, layout: Layout, ring: RingGroup) -> Iterator[Tensor]:
    """Yields (k, v) of this rank, then of rank - 1, rank - 2, ...: only the blocks that this rank needs are filled in.

    Wire: a message to each rank that needs some of this one's blocks. See [Note: a block is sent while it is read].
    """
    block = kv
    for t in range(ring.groups):
        pending, arriving, places = NOTHING, block, None
        if t + 1 < ring.groups:
            target, source = (ring.group + t + 1) % ring.groups, (ring.group - t - 1) % ring.groups
            sent = kv.view(2, -1, kv.shape[4]).index_select(1, _places(layout, ring.group, target, needed, kv))
            places = _places(layout, source, ring.group, needed, kv)
            arriving = kv.new_empty((2, len(places), kv.shape[4]))
            pending = ring.exchange([(sent, target)], [(arriving, source)])
        yield block
        pending.wait()
        if places is not None:
            # As large as the owner's, so that tiles count keys there as here. What nobody chose is never read.
            block = kv.new_empty((*kv.shape[:2], layout.lengths[source], *kv.shape[3:]))
            block.view(2, -1, kv.shape[4]).index_copy_(1, places, arriving)


def _cast_gradients(
    blocks: Iterator[Tensor],
    tiles: Mapping[int, Sequence[HeadTiles]],
    needed: Tensor,
    layout: Layout,
    ring: RingGroup,
    running: Backward,
) -> Tensor:
    """d(k, v) of this rank's tokens. Wire: as many messages back, of the accumulator's dtype."""
    total, flat = torch.empty(0), torch.empty(0)
    pending, arriving, places = NOTHING, total, total
    for t, kv in enumerate(blocks):
        owner, receiver = (ring.group - t) % ring.groups, (ring.group + t) % ring.groups
        dkv = torch.zeros(kv.shape, dtype=running.dq.dtype, device=kv.device)
        running.add_heads(kv[0], kv[1], tiles.get(owner, ()), dkv[0], dkv[1])
        if t == 0:  # this rank's own keys: their gradients travel nowhere
            total, flat = dkv, dkv.view(2, -1, dkv.shape[4])
            continue
        # Those of step t - 1 travelled during the kernels above, and are added in the same order in every run.
        pending.wait()
        if t > 1:
            flat.index_add_(1, places, arriving)
        places = _places(layout, ring.group, receiver, needed, kv)
        arriving = flat.new_empty((2, len(places), kv.shape[4]))
        leaving = dkv.view(2, -1, kv.shape[4]).index_select(1, _places(layout, owner, ring.group, needed, kv))
        pending = ring.exchange([(leaving, owner)], [(arriving, receiver)])
    pending.wait()
    if ring.groups > 1:
        flat.index_add_(1, places, arriving)
    return total


def _places(layout: Layout, owner: int, receiver: int, needed: Tensor, like: Tensor) -> Tensor:
    return to_device(places_sent(layout, owner, receiver, needed), like.device)


# --------------------------------------------------------------------------------------------------------- operator


def block_counts(layout: Layout, rank: int) -> list[int]:
    """[own blocks, all blocks, ranks, kinds of tiles, most of one + 1]: of which the operator's results have their sizes."""
    blocks, table = blocks_of(layout), tile_table(layout, rank, HOST)
    return [len(blocks.of(rank)), blocks.count, layout.ranks, len(table.kinds), table.most + 1]


def _fake_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    counts: list[int],
    group: str,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    own, blocks, ranks, kinds, most = counts
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype)),
        q.new_empty((q.shape[0], q.shape[2], own, blocks), dtype=torch.bool),
        q.new_empty((ranks, q.shape[0], k.shape[2], blocks), dtype=torch.bool, device=HOST),
        q.new_empty((kinds, most), dtype=torch.int64, device=HOST),
    )


@custom_op("context_sparse_attention", fake=_fake_attention)
def context_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    counts: list[int],
    group: str,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, chosen, needed, counted); see `choose_blocks`, and [Note: why operators]."""
    layout = layout_of(table)
    ring = ring_group_of(layout, group)
    chosen, needed, counted = choose_blocks(q, k, layout, ring, scale)
    _tell(layout, ring.rank, chosen, needed, counted, backward=False)
    tiles = head_tiles(chosen, counted, tile_table(layout, ring.rank, chosen.device))
    running = Forward(q, scale, softcap)
    for t, kv in enumerate(_cast(torch.stack((k, v)), needed, layout, ring)):
        owner = (ring.group - t) % ring.groups
        running.add_heads(kv[0], kv[1], tiles.get(owner, ()))
    out, lse = running.out, running.lse
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return out.to(q.dtype), lse, chosen, needed, counted


def _fake_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, chosen: Tensor, needed: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), k.new_empty((2, *k.shape))


@custom_op("context_sparse_attention_backward", fake=_fake_attention_backward)
def context_sparse_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    chosen: Tensor,
    needed: Tensor,
    counted: Tensor,
    table: Tensor,
    group: str,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(dq, d(k, v)), by the choice of the forward."""
    layout = layout_of(table)
    ring = ring_group_of(layout, group)
    _tell(layout, ring.rank, chosen, needed, counted, backward=True)
    tiles = head_tiles(chosen, counted, tile_table(layout, ring.rank, chosen.device))
    running = Backward(dout.contiguous(), q, out, lse, scale, softcap)
    # Blocks travel a second time: kept from forward, they would be all chosen keys of the sequence on every rank.
    blocks = _cast(torch.stack((k, v)), needed, layout, ring)
    dkv = _cast_gradients(blocks, tiles, needed, layout, ring, running)
    return running.dq.to(q.dtype), dkv.to(k.dtype)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, table, _, ctx.group, ctx.scale, ctx.softcap, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, table, sinks)


@once_differentiable("the backward of attention over cp is a kernel with messages.", "Use a mesh without cp")
def _attention_gradient(ctx: Any, dout: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    """Of out alone: the other results are there so that autograd saves them."""
    q, k, v, out, lse, chosen, needed, counted, table, sinks = ctx.saved_tensors
    dq, dkv = context_sparse_attention_backward(
        dout, q, k, v, out, lse, chosen, needed, counted, table, ctx.group, ctx.scale, ctx.softcap
    )
    dsinks = sinks_gradient(dout, out, lse, sinks) if sinks is not None else None
    return dq, dkv[0], dkv[1], None, None, None, None, None, dsinks


context_sparse_attention.register_autograd(_attention_gradient, setup_context=_save_attention)
