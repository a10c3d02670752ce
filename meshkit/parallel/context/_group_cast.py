"""Group cast of context parallelism: every owner sends each group only the keys and values that its queries see.

Dims: B batch, S keys sent, K key/value heads, D head_dim. A message is kv [2, B, S, K, D] in the compute dtype, its
gradient one tensor of that shape in the accumulator's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshkit.core.attention_kernels import Backward
from meshkit.mask import Interval
from meshkit.parallel.context._layout import Plan
from meshkit.parallel.context._ring_group import NOTHING, RingGroup, empty_block


def cast_blocks(kv: Tensor, steps: Plan, ring: RingGroup) -> Iterator[Tensor]:
    """Yields (k, v) of this group, then of group - 1, group - 2, ... only the keys that this group's queries see.

    Each owner sends them directly.

    Wire: at most groups - 1 sends, of just the keys that the receiver needs. Source: GroupCast of MagiAttention 2025.
    """
    block = kv
    for t in range(ring.groups):
        arriving, pending = block, NOTHING
        if t + 1 < ring.groups:
            arriving = empty_block(kv, _count(steps.steps[t + 1].keys))
            # In step t everybody sends t + 1 groups ahead and receives from as far behind, so sends and receives pair up
            # although each group walks through its own list of owners.
            sent_keys = _take_keys(kv, steps.sends[t + 1])
            pending = ring.exchange([(sent_keys, ring.group + t + 1)], [(arriving, ring.group - t - 1)])
        yield block  # See [Note: a block is sent while it is read]
        pending.wait()
        block = arriving


def cast_gradients(blocks: Iterator[Tensor], steps: Plan, ring: RingGroup, running: Backward) -> Tensor:
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
        # The gradients of step t - 1 travelled during the kernels above. They are added step by step and not as they come,
        # so that a run repeats its sums bit for bit.
        pending.wait()
        _add_to_keys(total, sent_keys, arriving)
        sent_keys = steps.sends[t]
        arriving = empty_block(total, _count(sent_keys))
        pending = ring.exchange([(dkv, ring.group - t)], [(arriving, ring.group + t)])
    pending.wait()
    _add_to_keys(total, sent_keys, arriving)
    return total


def _take_keys(kv: Tensor, keys: tuple[Interval, ...]) -> Tensor:
    if not keys:
        return empty_block(kv, 0)
    return torch.cat([kv[:, :, first:after] for first, after in keys], dim=2)


def _add_to_keys(dkv: Tensor, keys: tuple[Interval, ...], received: Tensor) -> None:
    """The mirror of `_take_keys`: adds the received gradients to those of the keys that were sent."""
    offset = 0
    for first, after in keys:
        dkv[:, :, first:after] += received[:, :, offset : offset + after - first]
        offset += after - first


def _count(keys: tuple[Interval, ...]) -> int:
    return sum(after - first for first, after in keys)
