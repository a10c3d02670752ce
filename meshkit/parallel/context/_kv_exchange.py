"""Ring attention, all-gather and group cast: the three ways in which keys and values reach the queries.

Dims: B batch, T tokens of this group, S tokens of another, N tokens of all, H query heads, K key/value heads, D head_dim.
(k, v) travel as one tensor kv [2, B, S, K, D] in the compute dtype, their gradients as one of the accumulator's dtype.
Each exchange has a forward and its mirror, and sends the next message while it computes with the block at hand.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from meshkit.core.waiting import waiting
from meshkit.mask import Interval
from meshkit.parallel.context._kernels import Backward, Forward, accumulator_dtype
from meshkit.parallel.context._layout import Layout, Plan, gathered_tiles, plan
from meshkit.parallel.context._ring_group import NOTHING, RingGroup

# [Note: a block is sent while it is read]
# The message with a block leaves before attention over that block is queued. Both only read it, so neither waits for the
# other, and the next block arrives in memory of its own. On CUDA the communicator uses both buffers on a stream of its own,
# of which the caching allocator knows nothing: `pending` keeps them referenced until `wait`, after which the compute stream
# follows the communicator's.


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, ring: RingGroup, scale: float) -> tuple[Tensor, Tensor]:
    """q [B, T, H, D], k and v [B, T, K, D] of this group -> (out [B, T, H, D], lse [B, T, H]), out not yet rounded."""
    if layout.exchange == "all_gather":
        return _attend_gathered(q, k, v, layout, ring, scale)
    steps = plan(layout, ring.group)
    running = Forward(q, scale)
    for step, (k_BSKD, v_BSKD) in zip(steps.steps, _kv_blocks(torch.stack((k, v)), steps, ring), strict=True):
        running.add(k_BSKD, v_BSKD, step.tiles)
    return running.out, running.lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Layout,
    ring: RingGroup,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(dq, d(k, v)) in the accumulator's dtype."""
    if layout.exchange == "all_gather":
        return _attend_gathered_backward(dout, q, k, v, out, lse, layout, ring, scale)
    steps = plan(layout, ring.group)
    running = Backward(dout, q, out, lse, scale)
    kv = torch.stack((k, v))
    gradients = _ring_gradients if layout.exchange == "ring" else _cast_gradients
    dkv = gradients(_kv_blocks(kv, steps, ring), steps, ring, running)
    return running.dq, dkv


def _kv_blocks(kv: Tensor, steps: Plan, ring: RingGroup) -> Iterator[Tensor]:
    return _ring_blocks(kv, steps, ring) if steps.layout.exchange == "ring" else _cast_blocks(kv, steps, ring)


# ------------------------------------------------------------------------------------------------------------ ring


def _ring_blocks(kv: Tensor, steps: Plan, ring: RingGroup) -> Iterator[Tensor]:
    """Yields (k, v) of group, group - 1, ...; each block is sent on to the next group before it is yielded.

    Wire: groups - 1 sends. Source: Liu et al. 2023; the zigzag order of tokens from Zhu 2024.
    """
    block = kv
    for t in range(ring.groups):
        arriving, pending = block, NOTHING
        if t + 1 < ring.groups:
            arriving = _like(kv, _length(steps, t + 1))
            pending = ring.exchange([(block, ring.group + 1)], [(arriving, ring.group - 1)])
        yield block  # the caller queues its attention: see [Note: a block is sent while it is read]
        pending.wait()
        block = arriving


def _ring_gradients(blocks: Iterator[Tensor], steps: Plan, ring: RingGroup, running: Backward) -> Tensor:
    """d(k, v) of this group. The gradient sum of a block follows the block round the ring, one hop behind; the last hop
    returns it to the block's owner.

    Wire: `groups` sends of the accumulator's dtype.
    """
    arriving, pending = None, NOTHING
    for t, (step, kv) in enumerate(zip(steps.steps, blocks, strict=True)):
        # Zeros, because keys that no query here sees get no tile. And a tensor of its own instead of adding into `arriving`,
        # so that attention over the block need not wait for the gradients from the rank before.
        dkv = torch.zeros(kv.shape, dtype=running.dq.dtype, device=kv.device)
        running.add(kv[0], kv[1], step.tiles, dkv[0], dkv[1])
        if arriving is not None:
            pending.wait()
            dkv += arriving
        if ring.groups == 1:
            return dkv
        arriving = _like(dkv, _length(steps, (t + 1) % ring.groups))
        pending = ring.exchange([(dkv, ring.group + 1)], [(arriving, ring.group - 1)])
    pending.wait()
    assert arriving is not None
    return arriving


def _length(steps: Plan, t: int) -> int:
    return steps.layout.group_length(steps.steps[t].owner)


# ------------------------------------------------------------------------------------------------------ group cast


def _cast_blocks(kv: Tensor, steps: Plan, ring: RingGroup) -> Iterator[Tensor]:
    """Yields (k, v) of this group, then of group - 1, group - 2, ... only the keys that this group's queries see.

    Each owner sends them directly.

    Wire: at most groups - 1 sends, of just the keys that the receiver needs. Source: GroupCast of MagiAttention 2025.
    """
    block = kv
    for t in range(ring.groups):
        arriving, pending = block, NOTHING
        if t + 1 < ring.groups:
            arriving = _like(kv, _count(steps.steps[t + 1].keys))
            sent_keys = _take_keys(kv, steps.sends[t + 1])
            pending = ring.exchange([(sent_keys, ring.group + t + 1)], [(arriving, ring.group - t - 1)])
        yield block
        pending.wait()
        block = arriving


def _cast_gradients(blocks: Iterator[Tensor], steps: Plan, ring: RingGroup, running: Backward) -> Tensor:
    """d(k, v) of this group: receivers return the gradients of the keys they were sent, and the owner adds them up.

    Wire: as many sends as forward, of the accumulator's dtype.
    """
    total = torch.empty(0)
    arriving, pending, sent_keys = total, NOTHING, tuple[Interval, ...]()
    for t, (step, kv) in enumerate(zip(steps.steps, blocks, strict=True)):
        dkv = torch.zeros(kv.shape, dtype=running.dq.dtype, device=kv.device)
        running.add(kv[0], kv[1], step.tiles, dkv[0], dkv[1])
        if t == 0:  # this group's own keys: their gradients travel nowhere
            total = dkv
            continue
        pending.wait()
        _add_to_keys(total, sent_keys, arriving)
        sent_keys = steps.sends[t]
        arriving = _like(total, _count(sent_keys))
        pending = ring.exchange([(dkv, ring.group - t)], [(arriving, ring.group + t)])
    pending.wait()
    _add_to_keys(total, sent_keys, arriving)
    return total


def _take_keys(kv: Tensor, keys: tuple[Interval, ...]) -> Tensor:
    if not keys:
        return _like(kv, 0)
    return torch.cat([kv[:, :, first:after] for first, after in keys], dim=2)


def _add_to_keys(dkv: Tensor, keys: tuple[Interval, ...], received: Tensor) -> None:
    """The mirror of `_take_keys`: adds the received gradients to those of the keys that were sent."""
    offset = 0
    for first, after in keys:
        dkv[:, :, first:after] += received[:, :, offset : offset + after - first]
        offset += after - first


def _count(keys: tuple[Interval, ...]) -> int:
    return sum(after - first for first, after in keys)


def _like(kv: Tensor, tokens: int) -> Tensor:
    return kv.new_empty((*kv.shape[:2], tokens, *kv.shape[3:]))


# ------------------------------------------------------------------------------------------------------ all-gather


def _attend_gathered(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, ring: RingGroup, scale: float
) -> tuple[Tensor, Tensor]:
    """Every group computes with all keys, `layout.kv_heads` key/value heads at a time.

    Wire: an all-gather for each set of heads; that of the next set travels during the attention of this one. Shards are
    padded to the longest. Source: Llama 3 2024, section 3.3.2; Zhu 2024 for the streaming over heads.
    """
    tiles = gathered_tiles(layout, ring.group)
    outs, lses = [], []
    for heads, (k_BNKD, v_BNKD) in _gathered_kv(torch.stack((k, v)), layout, ring):
        running = Forward(q[:, :, _query_heads(heads, q, k)], scale)
        running.add(k_BNKD, v_BNKD, tiles)
        outs.append(running.out)
        lses.append(running.lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _attend_gathered_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Layout,
    ring: RingGroup,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Wire: the all-gathers again, and for each set of heads a reduce-scatter of d(k, v) in the accumulator's dtype."""
    tiles = gathered_tiles(layout, ring.group)
    dtype = accumulator_dtype(q.dtype)
    dqs, dkvs = [], []
    for heads, (k_BNKD, v_BNKD) in _gathered_kv(torch.stack((k, v)), layout, ring):
        q_heads = _query_heads(heads, q, k)
        running = Backward(dout[:, :, q_heads], q[:, :, q_heads], out[:, :, q_heads], lse[:, :, q_heads], scale)
        dkv = torch.zeros((2, *k_BNKD.shape), dtype=dtype, device=q.device)
        running.add(k_BNKD, v_BNKD, tiles, dkv[0], dkv[1])
        dqs.append(running.dq)
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
