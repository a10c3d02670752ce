"""Ulysses: the ranks of a group trade a part of the tokens of all heads for all tokens of a part of the heads.

Dims: B batch, L tokens of this rank, T tokens of its group, H query heads, K key/value heads, D head_dim. q, k and v travel
as one tensor [B, L, H + 2K, D].
Source: Jacobs et al. 2023. Heads that the group does not divide are split unevenly; a key/value head that query heads of
several ranks read goes to each of them, and its gradient is the sum over them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core.sharding import even_part
from meshkit.parallel.context._kernels import accumulator_dtype
from meshkit.parallel.context._layout import Layout
from meshkit.parallel.context._ring_group import RingGroup


def kv_heads_read(part: int, parts: int, heads: int, kv_heads: int) -> range:
    """The key/value heads that those query heads read."""
    own = even_part(heads, parts, part)
    if not own or not kv_heads:
        return range(0)
    ratio = heads // kv_heads
    return range(own.start // ratio, (own.stop - 1) // ratio + 1)


def heads_of(part: int, parts: int, heads: int, kv_heads: int) -> list[int]:
    """Places of a rank's heads among the H + 2K of the joined tensor; kv_heads=0 for a tensor of query heads only."""
    keys = kv_heads_read(part, parts, heads, kv_heads)
    return [
        *even_part(heads, parts, part),
        *(heads + key for key in keys),
        *(heads + kv_heads + key for key in keys),
    ]


def regroup(part: int, parts: int, heads: int, kv_heads: int) -> list[int] | None:
    """For each query head of a rank, which of its key/value heads it reads, unless equal runs of them read one each."""
    own, keys = even_part(heads, parts, part), kv_heads_read(part, parts, heads, kv_heads)
    if not own:
        return None
    read = [head // (heads // kv_heads) - keys.start for head in own]
    even = [index * len(keys) // len(own) for index in range(len(own))]
    return None if read == even and len(own) % len(keys) == 0 else read


def to_heads(x: Tensor, layout: Layout, ring: RingGroup, heads: int, kv_heads: int) -> Tensor:
    """x [B, L, heads + 2 kv_heads, D] of this rank's tokens -> [B, T, own heads, D] of its group's.

    Wire: one all-to-all.
    """
    parts, own = layout.ulysses, ring.rank % layout.ulysses
    sent = [
        x[:, :, heads_of(part, parts, heads, kv_heads)].reshape(-1) if parts > 1 else x.reshape(-1)
        for part in range(parts)
    ]
    held = len(heads_of(own, parts, heads, kv_heads))
    shapes = [(x.shape[0], layout.lengths[rank], held, x.shape[3]) for rank in layout.members(ring.group)]
    return torch.cat(_all_to_all(sent, shapes, layout, ring), dim=1)


def to_tokens(x: Tensor, layout: Layout, ring: RingGroup, heads: int, kv_heads: int) -> Tensor:
    """The transpose of `to_heads`: x [B, T, own heads, D] -> [B, L, heads + 2 kv_heads, D], copies of a head summed.

    Wire: one all-to-all.
    """
    parts, members = layout.ulysses, layout.members(ring.group)
    sent = [piece.reshape(-1) for piece in x.split([layout.lengths[rank] for rank in members], dim=1)]
    length = layout.lengths[ring.rank]
    sources = [heads_of(part, parts, heads, kv_heads) for part in range(parts)]
    shapes = [(x.shape[0], length, len(source), x.shape[3]) for source in sources]
    total = torch.zeros(
        (x.shape[0], length, heads + 2 * kv_heads, x.shape[3]), dtype=accumulator_dtype(x.dtype), device=x.device
    )
    for source, piece in zip(sources, _all_to_all(sent, shapes, layout, ring), strict=True):
        total.index_add_(2, torch.tensor(source, dtype=torch.int64, device=x.device), piece.to(total.dtype))
    return total.to(x.dtype)


def _all_to_all(sent: list[Tensor], shapes: Sequence[tuple[int, ...]], layout: Layout, ring: RingGroup) -> list[Tensor]:
    """One flat piece to each rank of our group, one of each shape back. Ranks of other groups send nothing."""
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
