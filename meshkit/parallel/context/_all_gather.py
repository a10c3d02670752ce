"""All-gather of keys and values in context parallelism (Llama 3's): a set of heads at a time, all tokens of it.

Dims: B batch, T tokens of this group, N tokens of all, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from meshkit.core.attention_kernels import Backward, Forward, accumulator_dtype
from meshkit.core.waiting import waiting
from meshkit.parallel.context._layout import Layout, gathered_tiles
from meshkit.parallel.context._ring_group import RingGroup


def attend_gathered(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, ring: RingGroup, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Every group computes with all keys, `layout.kv_heads` key/value heads at a time.

    Wire: an all-gather for each set of heads; that of the next set travels during the attention of this one. Shards are
    padded to the longest. Source: Llama 3 2024, section 3.3.2; Zhu 2024 for the streaming over heads.
    """
    tiles = gathered_tiles(layout, ring.group)
    outs, lses = [], []
    for heads, (k_BNKD, v_BNKD) in _gathered_kv(torch.stack((k, v)), layout, ring):
        running = Forward(q[:, :, _query_heads(heads, q, k)], scale, softcap)
        running.add(k_BNKD, v_BNKD, tiles)
        outs.append(running.out)
        lses.append(running.lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def attend_gathered_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Layout,
    ring: RingGroup,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Wire: the all-gathers again, and for each set of heads a reduce-scatter of d(k, v) in the accumulator's dtype."""
    tiles = gathered_tiles(layout, ring.group)
    # The sum over groups is made by the reduce-scatter, in the dtype of its message: in bf16 each hop would round it.
    dtype = accumulator_dtype(q.dtype)
    dqs, dkvs = [], []
    for heads, (k_BNKD, v_BNKD) in _gathered_kv(torch.stack((k, v)), layout, ring):
        q_heads = _query_heads(heads, q, k)
        running = Backward(
            dout[:, :, q_heads], q[:, :, q_heads], out[:, :, q_heads], lse[:, :, q_heads], scale, softcap
        )
        dkv = torch.zeros((2, *k_BNKD.shape), dtype=dtype, device=q.device)
        running.add(k_BNKD, v_BNKD, tiles, dkv[0], dkv[1])
        dqs.append(running.dq)
        # Zeros, since `all_runs` leaves the padding out: its gradient is returned too and goes on into the weights.
        by_group = dkv.new_zeros((layout.groups, 2, k.shape[0], max(layout.lengths), *dkv.shape[3:]))
        for first, after, group, offset in layout.all_runs:
            by_group[group][:, :, offset : offset + after - first] = dkv[:, :, first:after]
        shard = torch.empty_like(by_group[0])
        # Not waited for here: the next heads are computed meanwhile. `dkvs` keeps both buffers referenced until the wait.
        rows = rearrange(by_group, "group kv b l k d -> (group kv) b l k d")
        work = dist.reduce_scatter_tensor(shard, rows, group=ring.process_group, async_op=True)
        dkvs.append((shard, work, by_group))
    with waiting("the gradients of keys and values"):
        for _, work, _ in dkvs:
            if work is not None:
                work.wait()
    return torch.cat(dqs, dim=2), torch.cat([shard for shard, _, _ in dkvs], dim=3)[:, :, : k.shape[1]].contiguous()


def _gathered_kv(kv: Tensor, layout: Layout, ring: RingGroup) -> Iterator[tuple[slice, Tensor]]:
    """Yields, for each set of heads, (key/value heads, their kv [2, B, N, heads, D] of all tokens in order)."""
    # A group is one rank here: the policy refuses Ulysses beside all_gather.
    longest = max(layout.lengths)

    def start(heads: slice) -> tuple[Tensor, Tensor, dist.Work | None]:
        shard = kv.new_zeros((*kv.shape[:2], longest, heads.stop - heads.start, kv.shape[4]))
        shard[:, :, : kv.shape[2]] = kv[:, :, :, heads]
        gathered = shard.new_empty((layout.groups * 2, *shard.shape[1:]))
        # The shard is returned only to be kept referenced while the communicator reads it.
        return shard, gathered, dist.all_gather_into_tensor(gathered, shard, group=ring.process_group, async_op=True)

    count = kv.shape[3]
    sets = [slice(first, min(first + layout.kv_heads, count)) for first in range(0, count, layout.kv_heads)]
    pending = start(sets[0])
    for heads, following in zip(sets, [*sets[1:], None], strict=True):
        _, gathered, work = pending
        if work is not None:
            with waiting("keys and values of all cp groups"):
                work.wait()
        # Started only now, so that no more than two sets are in memory: this one, and the one under way.
        if following is not None:
            pending = start(following)
        by_group = rearrange(gathered, "(group kv) b l k d -> group kv b l k d", group=layout.groups)
        yield (
            heads,
            torch.cat(
                [
                    by_group[group][:, :, offset : offset + after - first]
                    for first, after, group, offset in layout.all_runs
                ],
                dim=2,
            ),
        )


def _query_heads(heads: slice, q: Tensor, k: Tensor) -> slice:
    """The query heads that read these key/value heads."""
    ratio = q.shape[2] // k.shape[2]
    return slice(heads.start * ratio, heads.stop * ratio)
