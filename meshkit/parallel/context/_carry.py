"""The state of a recurrent mixer goes over the ranks of cp (state passing), and its gradient back.

[Note: a chain and not a tree of states]
A piece changes the state by S -> A S + L. A tree (Blelloch's scan) has log2(P) rounds in place of P - 1, but sends A too, K
numbers for each V of the state with the delta rule, and twice as many messages. A chain sends (P - 1) states in all, once
each way. Every rank has A and L of its pieces before the first message arrives, so a round is one product [K, K] x [K, V] and
one message: the chain waits for latencies and not for the chunks, of which a rank has thousands of tokens.
Dims: B batch, P pieces of this rank, H heads, K and V sizes of a head.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core import _torch
from meshkit.parallel.context._layout import Layout
from meshkit.parallel.context._pieces import hops_of
from meshkit.parallel.context._ring_group import RingGroup


def ranks_of(group_name: str) -> RingGroup:
    """All ranks of cp, each a group of its own."""
    process_group = _torch.process_group(group_name)
    rank = dist.get_rank(process_group)
    return RingGroup(process_group, rank, rank, dist.get_world_size(process_group), 1)


def needs_products(layout: Layout, rank: int) -> bool:
    """Whether a state goes through a piece of this rank to another rank."""
    return any(hop.source is not None and hop.target is not None for hop in hops_of(layout, rank))


def pass_states(
    products: Tensor | None, added: Tensor, layout: Layout, ring: RingGroup, *, backward: bool = False
) -> Tensor:
    """The state before each of this rank's pieces [B, P, H, K, V]; backward: the gradient of the one after it.

    products: [B, P, H, 1, 1] or [B, P, H, K, K], what a piece multiplies a state with; None where `needs_products` is
    false. added: [B, P, H, K, V], the state after each piece from zeros; backward: the gradient of the state before it.
    Wire: one state for each two pieces of a document that follow each other on different ranks, in rounds of messages
    that depend on none of their own.
    """
    hops = hops_of(layout, ring.rank, backward=backward)
    arriving = [torch.zeros_like(added[:, 0])] * len(hops)  # by piece
    leaving: dict[int, Tensor] = {}
    passed: Tensor | None = None  # by the piece of this rank before
    for depth in range(1 + max((max(hop.depth, hop.target_depth) for hop in hops), default=0)):
        sends = [
            (leaving[hop.number], hop.target)
            for hop in hops
            if hop.target is not None and hop.target != ring.rank and hop.target_depth == depth
        ]
        receives = []
        for hop in hops:
            if hop.source is not None and hop.source != ring.rank and hop.depth == depth:
                arriving[hop.number] = torch.empty_like(added[:, 0], memory_format=torch.contiguous_format)
                receives.append((arriving[hop.number], hop.source))
        ring.exchange(sends, receives).wait("a state of another cp rank")
        for hop in hops:
            if hop.depth != depth:
                continue
            if hop.source == ring.rank:
                assert passed is not None
                arriving[hop.number] = passed
            if hop.target is not None:
                passed = added[:, hop.number]
                if hop.source is not None:
                    assert products is not None
                    passed = passed + _applied(products[:, hop.number], arriving[hop.number], backward)
                passed = passed.contiguous()
                leaving[hop.number] = passed
    return torch.stack(arriving, 1)


def _applied(product: Tensor, state: Tensor, transposed: bool) -> Tensor:
    if product.shape[-1] == 1:
        return product * state
    return (product.mT if transposed else product) @ state
