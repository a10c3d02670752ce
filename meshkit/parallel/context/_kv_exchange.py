"""How keys and values reach the queries: round the ring, gathered, or cast to the groups that need them.

Dims: B batch, T tokens of this group, S tokens of another, N tokens of all, H query heads, K key/value heads, D head_dim.
(k, v) travel as one tensor kv [2, B, S, K, D] in the compute dtype, their gradients as one of the accumulator's dtype.
Each exchange is a forward and its mirror. The next message is always under way while the present one is computed with.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core.waiting import waiting
from meshkit.mask import Interval
from meshkit.parallel.context._kernels import Backward, Forward, accumulator_dtype
from meshkit.parallel.context._layout import Layout, Plan, plan, whole_plan
from meshkit.parallel.context._ring_group import NOTHING, RingGroup

# [Note: a block is sent while it is read]
# The message with a block leaves before attention over that block is queued. Both only read it, so neither waits for the
# other, and the next block arrives in memory of its own. `pending` holds both ends, since on CUDA the wire uses them on a
# stream of its own; it lets go after `wait`, which makes the compute stream follow the wire.


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, ring: RingGroup, scale: float) -> tuple[Tensor, Tensor]:
    """q [B, T, H, D], k and v [B, T, K, D] of this group -> (out [B, T, H, D], lse [B, T, H]), out not yet rounded."""
    if layout.exchange == "all_gather":
        return _attend_gathered(q, k, v, layout, ring, scale)
    steps = plan(layout, ring.group)
    running = Forward(q, scale)
    for step, (k_BSKD, v_BSKD) in zip(steps.steps, _blocks(torch.stack((k, v)), steps, ring), strict=True):
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
    home = _ring_home if layout.exchange == "ring" else _cast_home
    dkv = home(_blocks(kv, steps, ring), steps, ring, running)
    return running.dq, dkv


def _blocks(kv: Tensor, steps: Plan, ring: RingGroup) -> Iterator[Tensor]:
    return _ring_blocks(kv, steps, ring) if steps.layout.exchange == "ring" else _cast_blocks(kv, steps, ring)


# ------------------------------------------------------------------------------------------------------------ ring


def _ring_blocks(kv: Tensor, steps: Plan, ring: RingGroup) -> Iterator[Tensor]:
    """The (k, v) of group, group - 1, ...: each block is handed on before it is computed with.

    Wire: groups - 1 sends. Source: Liu et al. 2023; the zigzag order of tokens from Zhu 2024.
    """
    held = kv
    for t in range(ring.groups):
        arriving, pending = held, NOTHING
        if t + 1 < ring.groups:
            arriving = _like(kv, _length(steps, t + 1))
            pending = ring.exchange([(held, ring.group + 1)], [(arriving, ring.group - 1)])
        yield held  # the caller queues its attention: see [Note: a block is sent while it is read]
        pending.wait()
        held = arriving


def _ring_home(blocks: Iterator[Tensor], steps: Plan, ring: RingGroup, running: Backward) -> Tensor:
    """d(k, v) of this group: each block's sum travels one hop behind the block itself, and the last hop brings it home.

    Wire: `groups` sends of the accumulator's dtype.
    """
    arriving, pending = None, NOTHING
    for t, (step, kv) in enumerate(zip(steps.steps, blocks, strict=True)):
        # Zeros, for tiles that no query sees are skipped; and a sum of its own, not added into `arriving`: so
        # attention over the block need not wait for the gradients that come from the rank before.
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
    """Own (k, v), then of group - 1, group - 2, ... the keys that some query of ours sees, straight from their owner.

    Wire: at most groups - 1 sends, of just the keys that the receiver needs. Source: GroupCast of MagiAttention 2025.
    """
    held = kv
    for t in range(ring.groups):
        arriving, pending = held, NOTHING
        if t + 1 < ring.groups:
            arriving = _like(kv, _count(steps.steps[t + 1].keys))
            wanted = _take(kv, steps.sends[t + 1])
            pending = ring.exchange([(wanted, ring.group + t + 1)], [(arriving, ring.group - t - 1)])
        yield held
        pending.wait()
        held = arriving


def _cast_home(blocks: Iterator[Tensor], steps: Plan, ring: RingGroup, running: Backward) -> Tensor:
    """d(k, v) of this group: every receiver sends back the gradients of the keys it was sent, and the owner adds them.

    Wire: as many sends as forward, of the accumulator's dtype.
    """
    total = torch.empty(0)
    arriving, pending, given = total, NOTHING, tuple[Interval, ...]()
    for t, (step, kv) in enumerate(zip(steps.steps, blocks, strict=True)):
        dkv = torch.zeros(kv.shape, dtype=running.dq.dtype, device=kv.device)
        running.add(kv[0], kv[1], step.tiles, dkv[0], dkv[1])
        if t == 0:  # our own keys, whose gradients are at home
            total = dkv
            continue
        pending.wait()
        _give(total, given, arriving)
        given = steps.sends[t]
        arriving = _like(total, _count(given))
        pending = ring.exchange([(dkv, ring.group - t)], [(arriving, ring.group + t)])
    pending.wait()
    _give(total, given, arriving)
    return total


def _take(kv: Tensor, keys: tuple[Interval, ...]) -> Tensor:
    if not keys:
        return _like(kv, 0)
    return torch.cat([kv[:, :, first:after] for first, after in keys], dim=2)


def _give(dkv: Tensor, keys: tuple[Interval, ...], arrived: Tensor) -> None:
    """The mirror of `_take`."""
    place = 0
    for first, after in keys:
        dkv[:, :, first:after] += arrived[:, :, place : place + after - first]
        place += after - first


def _count(keys: tuple[Interval, ...]) -> int:
    return sum(after - first for first, after in keys)


def _like(kv: Tensor, tokens: int) -> Tensor:
    return kv.new_empty((*kv.shape[:2], tokens, *kv.shape[3:]))


# ------------------------------------------------------------------------------------------------------ all-gather


def _attend_gathered(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, ring: RingGroup, scale: float
) -> tuple[Tensor, Tensor]:
    """Every group computes with all keys, `layout.kv_heads` key/value heads at a time.

    Wire: an all-gather for each set of heads, the next one under way while the present one is computed with. Parts are
    padded to the longest. Source: Llama 3 2024, section 3.3.2; Zhu 2024 for the streaming over heads.
    """
    tiles = whole_plan(layout, ring.group)
    outs, lses = [], []
    for heads, (k_BNKD, v_BNKD) in _gathered(torch.stack((k, v)), layout, ring):
        running = Forward(q[:, :, _queries(heads, q, k)], scale)
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
    tiles = whole_plan(layout, ring.group)
    dtype = accumulator_dtype(q.dtype)
    dqs, home = [], []
    for heads, (k_BNKD, v_BNKD) in _gathered(torch.stack((k, v)), layout, ring):
        rows = _queries(heads, q, k)
        running = Backward(dout[:, :, rows], q[:, :, rows], out[:, :, rows], lse[:, :, rows], scale)
        dkv = torch.zeros((2, *k_BNKD.shape), dtype=dtype, device=q.device)
        running.add(k_BNKD, v_BNKD, tiles, dkv[0], dkv[1])
        dqs.append(running.dq)
        parts = dkv.new_zeros((layout.groups, 2, k.shape[0], max(layout.lengths), *dkv.shape[3:]))
        for first, after, group, place in layout.all_runs:
            parts[group][:, :, place : place + after - first] = dkv[:, :, first:after]
        own = torch.empty_like(parts[0])
        # Not waited for here: the next heads are computed meanwhile. `home` holds what is sent and what is received.
        work = dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=ring.process_group, async_op=True)
        home.append((own, work, parts))
    with waiting("the gradients of keys and values"):
        for _, work, _ in home:
            if work is not None:
                work.wait()
    return torch.cat(dqs, dim=2), torch.cat([own for own, _, _ in home], dim=3)[:, :, : k.shape[1]].contiguous()


def _gathered(kv: Tensor, layout: Layout, ring: RingGroup) -> Iterator[tuple[slice, Tensor]]:
    """(key/value heads, their kv [2, B, N, heads, D] in the order of the tokens) for each set of heads."""
    longest = max(layout.lengths)

    def start(heads: slice) -> tuple[Tensor, Tensor, dist.Work | None]:
        part = kv.new_zeros((*kv.shape[:2], longest, heads.stop - heads.start, kv.shape[4]))
        part[:, :, : kv.shape[2]] = kv[:, :, :, heads]
        whole = part.new_empty((layout.groups * 2, *part.shape[1:]))
        return part, whole, dist.all_gather_into_tensor(whole, part, group=ring.process_group, async_op=True)

    count = kv.shape[3]
    sets = [slice(first, min(first + layout.kv_heads, count)) for first in range(0, count, layout.kv_heads)]
    pending = start(sets[0])
    for heads, following in zip(sets, [*sets[1:], None], strict=True):
        _, whole, work = pending
        if work is not None:
            with waiting("keys and values of all cp groups"):
                work.wait()
        # Only now, so that no more than two sets are alive: this one, and the one on its way.
        if following is not None:
            pending = start(following)
        by_group = whole.unflatten(0, (layout.groups, 2))
        yield (
            heads,
            torch.cat(
                [
                    by_group[group][:, :, place : place + after - first]
                    for first, after, group, place in layout.all_runs
                ],
                dim=2,
            ),
        )


def _queries(heads: slice, q: Tensor, k: Tensor) -> slice:
    """The query heads that read these key/value heads."""
    ratio = q.shape[2] // k.shape[2]
    return slice(heads.start * ratio, heads.stop * ratio)
