"""Ulysses (DeepSpeed-Ulysses): an all-to-all turns some tokens of all heads into all tokens of some heads.

Dims: B batch, L tokens of this rank, T tokens of its group, H query heads, K key/value heads, D head_dim. q, k and v travel
as one tensor [B, L, H + 2K, D].
Heads that the group does not divide are split unevenly. If query heads of several ranks read one key/value head, each of
these ranks gets a copy of it, and its gradient is the sum over the copies.
Source: Jacobs et al. 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core.attention_kernels import accumulator_dtype
from meshkit.core.sharding import even_part
from meshkit.parallel.context._layout import Layout
from meshkit.parallel.context._ring_group import RingGroup


def kv_heads_read(part: int, parts: int, heads: int, kv_heads: int) -> range:
    """The key/value heads that the query heads of rank `part` of the group read."""
    query_heads = even_part(heads, parts, part)
    if not query_heads or not kv_heads:
        return range(0)
    ratio = heads // kv_heads
    return range(query_heads.start // ratio, (query_heads.stop - 1) // ratio + 1)


def heads_of(part: int, parts: int, heads: int, kv_heads: int) -> list[int]:
    """Indices of a rank's heads among the H + 2K of the joined tensor; kv_heads=0 for a tensor of query heads only."""
    # Query heads, then the keys that they read, then the values: the order in which the receiver splits them again.
    keys = kv_heads_read(part, parts, heads, kv_heads)
    return [
        *even_part(heads, parts, part),
        *(heads + key for key in keys),
        *(heads + kv_heads + key for key in keys),
    ]


def regroup(part: int, parts: int, heads: int, kv_heads: int) -> list[int] | None:
    """For each query head of a rank, the index of the local key/value head that it reads.

    None if the kernel's own grouping says the same: equal runs of query heads read one key/value head each.
    """
    query_heads, keys = even_part(heads, parts, part), kv_heads_read(part, parts, heads, kv_heads)
    if not query_heads:
        return None
    read = [head // (heads // kv_heads) - keys.start for head in query_heads]
    even = [index * len(keys) // len(query_heads) for index in range(len(query_heads))]
    return None if read == even and len(query_heads) % len(keys) == 0 else read


def to_heads(x: Tensor, layout: Layout, ring: RingGroup, heads: int, kv_heads: int) -> Tensor:
    """x [B, L, heads + 2 kv_heads, D] of this rank's tokens -> [B, T, local heads, D] of its group's tokens.

    Wire: one all-to-all.
    """
    parts, this_part = layout.ulysses, ring.rank % layout.ulysses
    sent = [
        x[:, :, heads_of(part, parts, heads, kv_heads)].reshape(-1) if parts > 1 else x.reshape(-1)
        for part in range(parts)
    ]
    local_heads = len(heads_of(this_part, parts, heads, kv_heads))
    shapes = [(x.shape[0], layout.lengths[rank], local_heads, x.shape[3]) for rank in layout.members(ring.group)]
    return torch.cat(_all_to_all(sent, shapes, layout, ring), dim=1)


def to_tokens(x: Tensor, layout: Layout, ring: RingGroup, heads: int, kv_heads: int) -> Tensor:
    """The transpose of `to_heads`: x [B, T, local heads, D] -> [B, L, heads + 2 kv_heads, D], copies of a head summed.

    Wire: one all-to-all.
    """
    parts, members = layout.ulysses, layout.members(ring.group)
    # Token lengths differ between the ranks of a group where its share is not divisible: each gets its own number.
    sent = [piece.reshape(-1) for piece in x.split([layout.lengths[rank] for rank in members], dim=1)]
    length = layout.lengths[ring.rank]
    sources = [heads_of(part, parts, heads, kv_heads) for part in range(parts)]
    shapes = [(x.shape[0], length, len(source), x.shape[3]) for source in sources]
    # Summed in fp32: a key/value head has as many copies as ranks read it.
    total = torch.zeros(
        (x.shape[0], length, heads + 2 * kv_heads, x.shape[3]), dtype=accumulator_dtype(x.dtype), device=x.device
    )
    for source, piece in zip(sources, _all_to_all(sent, shapes, layout, ring), strict=True):
        total.index_add_(2, torch.tensor(source, dtype=torch.int64, device=x.device), piece.to(total.dtype))
    return total.to(x.dtype)


def _all_to_all(sent: list[Tensor], shapes: Sequence[tuple[int, ...]], layout: Layout, ring: RingGroup) -> list[Tensor]:
    """Send one flat piece to each rank of this group; receive one piece of each shape.

    All ranks of cp take part, since the process group is that of the axis: ranks of other groups exchange nothing.
    """
    # Flat, since heads or tokens may be uneven: the message is a list of pieces of any shape, which both ends compute.
    sizes = [torch.Size(shape).numel() for shape in shapes]
    before = ring.group * layout.ulysses
    after = layout.ranks - before - layout.ulysses
    arrived = sent[0].new_empty(sum(sizes))
    dist.all_to_all_single(
        arrived,
        torch.cat(sent),
        output_split_sizes=[0] * before + sizes + [0] * after,
        input_split_sizes=[0] * before + [piece.numel() for piece in sent] + [0] * after,
        group=ring.process_group,
    )
    return [piece.view(shape) for piece, shape in zip(arrived.split(sizes), shapes, strict=True)]
