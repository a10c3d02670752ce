"""Ring attention in one level and two, all-gather and group cast: the ways in which keys and values reach the queries.

Dims: B batch, T tokens of this group, S tokens of another, H query heads, K key/value heads, D head_dim.
(k, v) travel as one tensor kv [2, B, S, K, D] in the compute dtype, their gradients as one of the accumulator's dtype.
Each exchange has a forward and its mirror, and sends the next message while it computes with the block at hand.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshkit.core.attention_kernels import Backward, Forward
from meshkit.parallel.context._all_gather import attend_gathered, attend_gathered_backward
from meshkit.parallel.context._double_ring import double_ring_blocks, double_ring_gradients
from meshkit.parallel.context._group_cast import cast_blocks, cast_gradients
from meshkit.parallel.context._layout import Layout, Plan, plan
from meshkit.parallel.context._ring import ring_blocks, ring_gradients
from meshkit.parallel.context._ring_group import RingGroup

# [Note: a block is sent while it is read]
# The message with a block leaves before attention over that block is queued. Both only read it, so neither waits for the
# other, and the next block arrives in memory of its own. On CUDA the communicator uses both buffers on a stream of its own,
# of which the caching allocator knows nothing: `pending` keeps them referenced until `wait`, after which the compute stream
# follows the communicator's.


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, ring: RingGroup, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """q [B, T, H, D], k and v [B, T, K, D] of this group -> (out [B, T, H, D], lse [B, T, H]), out not yet rounded."""
    if layout.exchange == "all_gather":
        return attend_gathered(q, k, v, layout, ring, scale, softcap)
    steps = plan(layout, ring.group)
    running = Forward(q, scale, softcap)
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
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(dq, d(k, v)) in the accumulator's dtype."""
    if layout.exchange == "all_gather":
        return attend_gathered_backward(dout, q, k, v, out, lse, layout, ring, scale, softcap)
    steps = plan(layout, ring.group)
    running = Backward(dout, q, out, lse, scale, softcap)
    # Other groups' blocks travel a second time: kept from forward, they would be all keys of the sequence on every rank.
    kv = torch.stack((k, v))
    gradients = {"ring": ring_gradients, "double_ring": double_ring_gradients, "group_cast": cast_gradients}
    dkv = gradients[layout.exchange](_kv_blocks(kv, steps, ring), steps, ring, running)
    return running.dq, dkv


def _kv_blocks(kv: Tensor, steps: Plan, ring: RingGroup) -> Iterator[Tensor]:
    blocks = {"ring": ring_blocks, "double_ring": double_ring_blocks, "group_cast": cast_blocks}
    return blocks[steps.layout.exchange](kv, steps, ring)
