"""Communication volume of context parallelism: what a layer's attention or mixer sends, by arithmetic on the layout.

For even shards of s tokens, P ranks, bf16 keys and fp32 gradients a ring sends s K D (16 P - 8) bytes a layer, and Ulysses
8 (P - 1) / P s D (H + Ke) where Ke counts key/value heads with their copies. No ranks and no tensors are needed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from meshkit.core.sharding import even_part
from meshkit.parallel.context._blocks import blocks_of, pairs_of
from meshkit.parallel.context._choose_blocks import long_documents, most_blocks
from meshkit.parallel.context._double_ring import sent_inside_and_across
from meshkit.parallel.context._layout import Layout, plan
from meshkit.parallel.context._pieces import halo_of, hops_of
from meshkit.parallel.context._ulysses import heads_of, kv_heads_read, regroup
from meshkit.strategy import BlockTopK

Sizes = Counter[tuple[str, int]]
"""(operation, bytes) -> how often. An operation is send, all_to_all (bytes to other ranks), all_gather or reduce_scatter."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention layer on one rank: batch rows, its heads, and bytes per element of activations and of running sums."""

    heads: int
    kv_heads: int
    head_dim: int
    rows: int = 1
    itemsize: int = 2
    sum_itemsize: int = 4


def traffic(layout: Layout, rank: int, shape: Shape) -> tuple[Sizes, Sizes]:
    """(forward, backward): what `rank` sends for one layer; of sparse attention as if every rank needed each block that the
    mask shows it."""
    if layout.sparse is not None:
        kv_forward, kv_backward = block_traffic(layout, rank, shape, _all_needed(layout, shape))
        return choice_traffic(layout, rank, shape) + kv_forward, kv_backward
    forward, backward = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    group, part, parts = rank // layout.ulysses, rank % layout.ulysses, layout.ulysses
    token = shape.rows * shape.head_dim
    if parts > 1:
        lengths = {index: layout.lengths[member] for index, member in enumerate(layout.members(group))}
        joined = [len(heads_of(other, parts, shape.heads, shape.kv_heads)) for other in range(parts)]
        single = [len(even_part(shape.heads, parts, other)) for other in range(parts)]
        # q, k and v go to heads in forward and their gradients to tokens in backward; the output goes to tokens in forward.
        for head_counts, sent_to_heads, sent_to_tokens in ((joined, forward, backward), (single, backward, forward)):
            to_heads = sum(head_counts[other] for other in range(parts) if other != part) * lengths[part]
            to_tokens = head_counts[part] * sum(length for other, length in lengths.items() if other != part)
            sent_to_heads["all_to_all", to_heads * token * shape.itemsize] += 1
            sent_to_tokens["all_to_all", to_tokens * token * shape.itemsize] += 1
    # Where the kernel cannot group a rank's heads, `regroup` gives every query head a copy of its key/value head, and the
    # copies travel.
    heads = len(kv_heads_read(part, parts, shape.heads, shape.kv_heads))
    if parts > 1 and regroup(part, parts, shape.heads, shape.kv_heads) is not None:
        heads = len(even_part(shape.heads, parts, part))
    if layout.groups > 1:
        _add_kv_exchange(layout, group, heads, 2 * token, shape, forward, backward)
    return _without_empty(forward), _without_empty(backward)


def choice_traffic(layout: Layout, rank: int, shape: Shape) -> Sizes:
    """What a forward of sparse attention sends in order to choose blocks, and to say which are needed."""
    sizes = Counter[tuple[str, int]]()
    if layout.ranks == 1:
        return sizes
    blocks = blocks_of(layout).count
    if isinstance(layout.sparse, BlockTopK):
        means = layout.ranks * most_blocks(layout) * shape.kv_heads * shape.head_dim
        sizes["all_gather", shape.rows * means * shape.sum_itemsize] += 1
    else:
        queries = sum(len(document.queries) for document in long_documents(layout))
        if queries:
            row = shape.rows * shape.heads
            sizes["all_reduce", row * queries * shape.head_dim * shape.itemsize] += 1
            sizes["all_gather", layout.ranks * row * queries * shape.sum_itemsize] += 1
            sizes["all_reduce", row * 2 * blocks * shape.sum_itemsize] += 1
    sizes["all_gather", layout.ranks * shape.rows * shape.kv_heads * blocks] += 1
    return sizes


def block_traffic(layout: Layout, rank: int, shape: Shape, needed: Tensor) -> tuple[Sizes, Sizes]:
    """(forward, backward): the keys and gradients of chosen blocks that `rank` sends. needed: [ranks, rows, K, blocks] on the
    host, which blocks each rank needs."""
    forward, backward = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    blocks, token = blocks_of(layout), 2 * shape.head_dim

    def tokens(owner: int, receiver: int) -> int:
        mine = torch.from_numpy(blocks.of(owner))
        return int((needed[receiver][..., mine].long() * torch.from_numpy(blocks.size)[mine]).sum())

    for other in range(layout.ranks):
        if other != rank:
            sent, received = tokens(rank, other), tokens(other, rank)
            forward["send", sent * token * shape.itemsize] += 1
            backward["send", sent * token * shape.itemsize] += 1
            backward["send", received * token * shape.sum_itemsize] += 1
    return _without_empty(forward), _without_empty(backward)


def _all_needed(layout: Layout, shape: Shape) -> Tensor:
    shown = [pairs_of(layout, rank).candidates.any(0) for rank in range(layout.ranks)]
    return torch.stack(shown)[:, None, None].expand(-1, shape.rows, shape.kv_heads, -1)


def state_traffic(layout: Layout, rank: int, *, state_bytes: int) -> tuple[Sizes, Sizes]:
    """(forward, backward): the states that `rank` sends for one scan. state_bytes: of [rows, heads, K, V] in fp32.

    All ranks together send a state for each place where a document goes on on another rank: (cp - 1) of one document of
    contiguous tokens.
    """
    counts = [
        sum(hop.target not in (None, rank) for hop in hops_of(layout, rank, backward=backward))
        for backward in (False, True)
    ]
    forward, backward = (_without_empty(Counter({("send", state_bytes): count})) for count in counts)
    return forward, backward


def halo_traffic(layout: Layout, rank: int, *, width: int, token_bytes: int) -> tuple[Sizes, Sizes]:
    """(forward, backward): what `rank` sends for one short convolution. token_bytes: of a token of all rows."""
    halo = halo_of(layout, rank, width)
    forward = Counter([("send", len(tokens) * token_bytes) for _, tokens in halo.sends])
    backward = Counter([("send", count * token_bytes) for _, count in halo.receives])
    return forward, backward


def _add_kv_exchange(
    layout: Layout, group: int, heads: int, token: int, shape: Shape, forward: Sizes, backward: Sizes
) -> None:
    """Add the messages of the exchange of keys and values. token: elements of (k, v) of one token and one head."""
    groups = layout.groups
    if layout.exchange == "all_gather":
        longest = groups * max(layout.lengths)
        for first in range(0, heads, layout.kv_heads):
            size = longest * token * min(layout.kv_heads, heads - first)
            for sizes in (forward, backward):  # backward gathers again instead of keeping all keys
                sizes["all_gather", size * shape.itemsize] += 1
            backward["reduce_scatter", size * shape.sum_itemsize] += 1
        return
    kv, dkv = heads * token * shape.itemsize, heads * token * shape.sum_itemsize
    if layout.exchange == "double_ring":
        inside, across, back_inside, back_across = sent_inside_and_across(layout, group)
        for tokens in (*inside, *across):
            forward["send", tokens * kv] += 1
            backward["send", tokens * kv] += 1
        for tokens in (*back_inside, *back_across):
            backward["send", tokens * dkv] += 1
        return
    if layout.exchange == "ring":
        # Gradients make one hop more than keys: the last brings them home.
        for t in range(groups):
            owned = layout.group_length((group - t) % groups)
            if t + 1 < groups:
                forward["send", owned * kv] += 1
                backward["send", owned * kv] += 1
            backward["send", owned * dkv] += 1
        return
    steps = plan(layout, group)
    for t in range(1, groups):
        sent = sum(after - first for first, after in steps.sends[t])
        received = sum(after - first for first, after in steps.steps[t].keys)
        forward["send", sent * kv] += 1
        backward["send", sent * kv] += 1
        backward["send", received * dkv] += 1


def across_nodes(layout: Layout, rank: int, shape: Shape, *, node: int) -> int:
    """Bytes that `rank` sends over its network card for one layer of a ring, or a double ring, forward and backward.

    node: ranks of a node. Of a ring the last rank of a node sends for all of it.
    """
    group, part = divmod(rank, layout.ulysses)
    if layout.exchange == "ring":
        leaves = (group + 1) % (node // layout.ulysses) == 0 and node < layout.ranks
        blocks = sum(layout.group_length(other) for other in range(layout.groups)) * leaves
        kept = layout.group_length((group + 1) % layout.groups) * leaves  # the last block is sent no further
        keys, gradients = 2 * (blocks - kept), blocks
    else:
        _, across, _, back_across = sent_inside_and_across(layout, group)
        keys, gradients = 2 * sum(across), sum(back_across)
    heads = len(kv_heads_read(part, layout.ulysses, shape.heads, shape.kv_heads))
    return 2 * shape.rows * shape.head_dim * heads * (keys * shape.itemsize + gradients * shape.sum_itemsize)


def _without_empty(sizes: Sizes) -> Sizes:
    return Counter({key: count for key, count in sizes.items() if key[1]})


def total(sizes: Sizes) -> int:
    """Bytes, where an all-gather or reduce-scatter counts its whole tensor."""
    return sum(size * count for (_, size), count in sizes.items())
