"""Ring attention in two levels (double ring): rings inside of nodes, and between nodes one ring for each rank of a node.

While the blocks of a node go round inside of it, each rank sends its own on to the rank of its number in the next node, so
that all network cards of a node share what crosses.
Dims: B batch, S tokens of a group, K key/value heads, D head_dim; a block is kv [2, B, S, K, D]. A node has n groups, and
there are N nodes; step (o, i) is with the block of node - o and rank - i in it.
Source: LoongTrain 2024 (DoubleRing), section 4.3; Zeppelin 2025 for the cards.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshkit.core.attention_kernels import Backward
from meshkit.core.sharding import even_part
from meshkit.mask import Interval
from meshkit.parallel.context._layout import Layout, Plan, owner_at
from meshkit.parallel.context._ring_group import NOTHING, RingGroup, empty_block

# [Note: chunks of both levels in one batch]
# A communicator runs its batches one after the other. A whole block across would hold up the hops inside of the node that are
# queued behind it, so it goes in as many chunks as there are steps inside, each in one batch with the hop of its step.


def double_ring_blocks(kv: Tensor, steps: Plan, ring: RingGroup) -> Iterator[Tensor]:
    """Yields (k, v) of this group, then of the others of its node, then of the node before, ...

    Wire: (n - 1) N blocks inside of the node, and (N - 1) across, in n chunks each.
    """
    node = steps.layout.node
    nodes, block = ring.groups // node, kv
    for o in range(nodes):
        outer, coming = block, list[Tensor]()
        for i in range(node):
            sends, receives, arriving = list[tuple[Tensor, int]](), list[tuple[Tensor, int]](), block
            if i + 1 < node:
                arriving = empty_block(kv, _length(steps, o * node + i + 1))
                sends.append((block, _beside(ring, node, 1)))
                receives.append((arriving, _beside(ring, node, -1)))
            if o + 1 < nodes:
                coming.append(empty_block(kv, _size(chunk(_length(steps, (o + 1) * node), node, i))))
                sends.append((_part(outer, chunk(_length(steps, o * node), node, i)), ring.group + node))
                receives.append((coming[-1], ring.group - node))
            pending = ring.exchange(sends, receives)
            yield block  # See [Note: a block is sent while it is read]
            pending.wait()
            block = arriving
        if coming:
            block = torch.cat(coming, dim=2)


def double_ring_gradients(blocks: Iterator[Tensor], steps: Plan, ring: RingGroup, running: Backward) -> Tensor:
    """d(k, v) of this group. Inside of a node the sum of a block's gradients follows it one hop behind, and comes to the rank
    that brought the block into the node, which sends it to the owner during the steps with the next node's blocks.

    Wire: n N blocks inside of the node where it has several groups, and (N - 1) across, the last of them whole.
    """
    layout, node = steps.layout, steps.layout.node
    nodes, own = ring.groups // node, layout.group_length(ring.group)
    total = finished = inside = torch.empty(0)
    returned: tuple[Tensor, Interval] | None = None  # a chunk of this group's gradients from another node
    pending = NOTHING
    for t, (step, kv) in enumerate(zip(steps.steps, blocks, strict=True)):
        o, i = divmod(t, node)
        dkv = torch.zeros(kv.shape, dtype=running.dq.dtype, device=kv.device)
        running.add(kv[0], kv[1], step.tiles, dkv[0], dkv[1])
        pending.wait()
        if i == 0 and o == 1:
            total = inside
        elif i == 0 and o > 1:
            finished = inside
        elif i > 0:
            dkv += inside
        _add(total, returned)
        sends, receives, returned = list[tuple[Tensor, int]](), list[tuple[Tensor, int]](), None
        inside = dkv
        if node > 1:
            inside = empty_block(dkv, _length(steps, o * node + (i + 1) % node))
            sends.append((dkv, _beside(ring, node, 1)))
            receives.append((inside, _beside(ring, node, -1)))
        if o > 1:  # what was finished with the node before
            home, mine = chunk(_length(steps, (o - 1) * node), node, i), chunk(own, node, i)
            returned = empty_block(dkv, _size(mine)), mine
            sends.append((_part(finished, home), ring.group - (o - 1) * node))
            receives.append((returned[0], ring.group + (o - 1) * node))
        pending = ring.exchange(sends, receives)
    pending.wait()
    if nodes == 1:
        return inside
    _add(total, returned)
    whole = empty_block(inside, own)
    ring.exchange([(inside, ring.group - (nodes - 1) * node)], [(whole, ring.group + (nodes - 1) * node)]).wait()
    total += whole
    return total


def chunk(tokens: int, chunks: int, index: int) -> Interval:
    """Of a block's tokens."""
    part = even_part(tokens, chunks, index)
    return part.start, part.stop


def sent_inside_and_across(layout: Layout, group: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Tokens of each message of a group: of keys inside of its node and across, of gradients inside and across."""
    node, nodes = layout.node, layout.groups // layout.node

    def length(t: int) -> int:
        return layout.group_length(owner_at(layout, group, t))

    inside = [length(o * node + i) for o in range(nodes) for i in range(node - 1)]
    across = [_size(chunk(length(o * node), node, i)) for o in range(nodes - 1) for i in range(node)]
    back_inside = [length(t) for t in range(layout.groups)] if node > 1 else []
    back_across = [_size(chunk(length(o * node), node, i)) for o in range(1, nodes - 1) for i in range(node)]
    return inside, across, back_inside, back_across + ([length((nodes - 1) * node)] if nodes > 1 else [])


def _add(total: Tensor, returned: tuple[Tensor, Interval] | None) -> None:
    if returned is not None:
        total[:, :, slice(*returned[1])] += returned[0]


def _part(block: Tensor, part: Interval) -> Tensor:
    return block[:, :, slice(*part)].contiguous()


def _size(part: Interval) -> int:
    return part[1] - part[0]


def _beside(ring: RingGroup, node: int, step: int) -> int:
    """The next group of this group's node, or the one before."""
    home, place = divmod(ring.group, node)
    return home * node + (place + step) % node


def _length(steps: Plan, t: int) -> int:
    return steps.layout.group_length(steps.steps[t].owner)
