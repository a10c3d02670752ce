"""Ring attention: blocks of keys and values go round the `cp` ring, and their gradients follow one hop behind.

Dims: B batch, S tokens of a group, K key/value heads, D head_dim. A block is kv [2, B, S, K, D] in the compute dtype, its
gradient one tensor of that shape in the accumulator's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshkit.core.attention_kernels import Backward
from meshkit.parallel.context._layout import Plan
from meshkit.parallel.context._ring_group import NOTHING, RingGroup, empty_block


def ring_blocks(kv: Tensor, steps: Plan, ring: RingGroup) -> Iterator[Tensor]:
    """Yields (k, v) of group, group - 1, ...; each block is sent on to the next group before it is yielded.

    Wire: groups - 1 sends. Source: Liu et al. 2023; the zigzag order of tokens from Zhu 2024.
    """
    block = kv
    for t in range(ring.groups):
        arriving, pending = block, NOTHING
        if t + 1 < ring.groups:
            arriving = empty_block(kv, _length(steps, t + 1))
            pending = ring.exchange([(block, ring.group + 1)], [(arriving, ring.group - 1)])
        yield block  # the caller queues its attention. See [Note: a block is sent while it is read]
        pending.wait()
        block = arriving


def ring_gradients(blocks: Iterator[Tensor], steps: Plan, ring: RingGroup, running: Backward) -> Tensor:
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
        arriving = empty_block(dkv, _length(steps, (t + 1) % ring.groups))
        pending = ring.exchange([(dkv, ring.group + 1)], [(arriving, ring.group - 1)])
    pending.wait()
    assert arriving is not None
    return arriving


def _length(steps: Plan, t: int) -> int:
    return steps.layout.group_length(steps.steps[t].owner)
