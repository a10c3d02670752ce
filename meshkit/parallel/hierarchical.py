"""Hierarchical collectives (two-level, ring of rings): reduce inside of a node, exchange across nodes, gather inside.

| collective     | hops                                                        | a rank sends across nodes, of S bytes |
|----------------|-------------------------------------------------------------|---------------------------------------|
| all_gather     | across (its part), inside                                   | (o - 1) / o of S / i                  |
| reduce_scatter | inside, across (sums)                                       | (o - 1) / o of S / i                  |
| all_reduce     | reduce-scatter inside, all-reduce across, all-gather inside | 2 (o - 1) / o of S / i                |
| all_to_all     | across (to the same place in the other node), inside        | (o - 1) / o of S, as the flat one     |

o nodes of i ranks; a rank of both together has the index o x i. A flat ring carries (n - 1) / n of S over the links of each
node, all its ranks together, where two hops carry (o - 1) / o: so they gain where links between nodes are slow and nodes
few. Messages go in chunks: while one is inside of nodes, the next is on its way across.
Source: Patarasuk and Yuan 2009; Wu et al. 2023 (PaRO's ring of rings); Rajbhandari et al. 2022, section 5 (all-to-all).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from meshkit.core.waiting import waiting
from meshkit.parallel.shardings import Hops

ALIGNMENT = 16
"""bytes: chunks begin at multiples of it, where every dtype has whole elements"""


def chunks_of(size: int, chunk_bytes: int | None) -> tuple[int, ...]:
    """The bytes of each chunk of a message of so many: of chunk_bytes, rounded up to `ALIGNMENT`, the last has the rest."""
    if chunk_bytes is None or size <= 0:
        return (size,) if size > 0 else ()
    chunk = -(-chunk_bytes // ALIGNMENT) * ALIGNMENT
    return (chunk,) * (size // chunk) + ((size % chunk,) if size % chunk else ())


@dataclass(kw_only=True)
class _Chunk:
    """What one chunk does, hop by hop: each starts when the one before has ended, and `end` when all have.

    Hops own their buffers until `end`.
    """

    hops: list[Callable[[], dist.Work | None]]
    end: Callable[[], None]
    pending: dist.Work | None = None

    def start(self, hop: int) -> None:
        if self.pending is not None:
            with waiting("a hop of a hierarchical collective"):
                self.pending.wait()
        self.pending = self.hops[hop]()

    def finish(self) -> None:
        if self.pending is not None:
            with waiting("a hop of a hierarchical collective"):
                self.pending.wait()
        self.end()


def _run(chunks: Sequence[Callable[[], _Chunk]], hops: int) -> None:
    """Run chunks as a pipeline: in turn t chunk c takes its hop t - c, later chunks first.

    [Note: the order of hops]
    All ranks issue the same calls in the same order: they have the same number of chunks, each with all hops, also where a
    rank has nothing to send. A hop waits for the one before of its chunk alone. The later chunk's earlier hop is issued
    first, so that it is under way when this stream begins to wait. A chunk is made when its turn comes and dropped after its
    end: no more than hops + 1 of them hold buffers.
    """
    live: dict[int, _Chunk] = {}
    for turn in range(len(chunks) + hops):
        for index in range(min(turn, len(chunks) - 1), max(-1, turn - hops - 1), -1):
            hop = turn - index
            if hop == 0:
                live[index] = chunks[index]()
            if hop < hops:
                live[index].start(hop)
            else:
                live.pop(index).finish()


def all_gather(out: Tensor, part: Tensor, hops: Hops, *, chunk_bytes: int | None = None) -> None:
    """Every rank's part, in the order of ranks. part: [elements]; out: [ranks x elements], of which part may be a slice.

    chunk_bytes: of a part; None sends it in one.
    Wire, per chunk: an all-gather of the part over `outer`, of the results over `inner`.
    """
    outer, inner = hops.outer.size(), hops.inner.size()
    sent = part.reshape(-1).view(torch.uint8)
    gathered = out.view(-1).view(torch.uint8).view(outer, inner, -1)

    def chunk(start: int, end: int) -> _Chunk:
        across = sent.new_empty(outer * (end - start))
        inside: list[Tensor] = []

        def gather_inside() -> dist.Work | None:
            inside.append(sent.new_empty(inner * across.numel()))
            return dist.all_gather_into_tensor(inside[0], across, group=hops.inner, async_op=True)

        def copy_out() -> None:
            ordered = rearrange(inside[0], "(inner outer n) -> outer inner n", inner=inner, outer=outer)
            gathered[..., start:end].copy_(ordered)

        return _Chunk(
            hops=[
                lambda: dist.all_gather_into_tensor(across, sent[start:end], group=hops.outer, async_op=True),
                gather_inside,
            ],
            end=copy_out,
        )

    _run(_bounded(chunk, chunks_of(sent.numel(), chunk_bytes)), 2)


def reduce_scatter(
    out: Tensor,
    whole: Tensor,
    hops: Hops,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    chunk_bytes: int | None = None,
) -> None:
    """This rank's part of a sum over all ranks. whole: [ranks x elements]; out: [elements].

    chunk_bytes: of a part; None sends it in one. Sums differ from a flat reduction's in their order alone.
    Wire, per chunk: a reduce-scatter of all parts over `inner`, of the sums over `outer`.
    """
    outer, inner = hops.outer.size(), hops.inner.size()
    parts = rearrange(whole.reshape(-1), "(outer inner n) -> inner outer n", outer=outer, inner=inner)
    result = out.view(-1)

    def chunk(start: int, end: int) -> _Chunk:
        sent = parts[..., start:end].reshape(-1)
        sums = sent.new_empty(outer * (end - start))
        return _Chunk(
            hops=[
                lambda: dist.reduce_scatter_tensor(sums, sent, op=op, group=hops.inner, async_op=True),
                lambda: dist.reduce_scatter_tensor(result[start:end], sums, op=op, group=hops.outer, async_op=True),
            ],
            end=lambda: None,
        )

    _run(_bounded(chunk, _elements(out, chunk_bytes)), 2)


def all_reduce(
    tensor: Tensor, hops: Hops, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, chunk_bytes: int | None = None
) -> None:
    """The sum over all ranks, in place: the same bits on each. tensor: contiguous, of any size.

    chunk_bytes: of the part that a rank of a node sums; None sends it in one. What `inner` does not divide is padded.
    Wire, per chunk: a reduce-scatter over `inner`, an all-reduce of the part over `outer`, an all-gather over `inner`.
    """
    inner, values = hops.inner.size(), tensor.view(-1)
    # Each rank of a node sums an equal part of every chunk, so chunks are of inner parts.
    whole = None if chunk_bytes is None else inner * chunk_bytes

    def chunk(start: int, end: int) -> _Chunk:
        padded = values.new_zeros(-(-(end - start) // inner) * inner)
        padded[: end - start] = values[start:end]
        part = padded.new_empty(padded.numel() // inner)

        def copy_out() -> None:
            values[start:end].copy_(padded[: end - start])

        return _Chunk(
            hops=[
                lambda: dist.reduce_scatter_tensor(part, padded, op=op, group=hops.inner, async_op=True),
                lambda: dist.all_reduce(part, op=op, group=hops.outer, async_op=True),
                lambda: dist.all_gather_into_tensor(padded, part, group=hops.inner, async_op=True),
            ],
            end=copy_out,
        )

    _run(_bounded(chunk, _elements(tensor, whole)), 3)


def buffer_bytes(
    part: int, chunk_bytes: int | None, *, inner: int, outer: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The buffers that (an all-gather, a reduce-scatter) of such a part hold at once at the most, beside what they are given.

    Three chunks are under way, see [Note: the order of hops], of which an all-gather has begun the second hop of two.
    """
    sizes = chunks_of(part, chunk_bytes)[:3]
    across = [outer * size for size in sizes]
    inside = [inner * size for size in across]
    return (*across, *inside[:2]), (*across, *inside)


def all_to_all(rows: Tensor, counts: Sequence[Sequence[int]], hops: Hops, *, chunks: int = 1) -> Tensor:
    """Rows for each rank, in the order of ranks, to them. rows: [rows, ...]; returns what came, in the order of its senders.

    counts: counts[sender][receiver] rows of all ranks, as every rank knows them where counts were gathered; any may be 0.
    chunks: in how many parts the rows for each rank go.
    Wire, per chunk: an all-to-all over `outer`, to the rank at the same place of each node; another over `inner`.
    """
    outer, inner = hops.outer.size(), hops.inner.size()
    node, place = dist.get_rank(hops.outer), dist.get_rank(hops.inner)
    rank = node * inner + place
    starts = [0, *accumulate(counts[rank])]
    arriving = [counts[sender][rank] for sender in range(outer * inner)]
    out = rows.new_empty(sum(arriving), *rows.shape[1:])
    arrives = [0, *accumulate(arriving)]

    def bounds(sender: int, receiver: int, index: int) -> tuple[int, int]:
        count = counts[sender][receiver]
        return count * index // chunks, count * (index + 1) // chunks

    def size(sender: int, receiver: int, index: int) -> int:
        start, end = bounds(sender, receiver, index)
        return end - start

    def chunk(index: int) -> _Chunk:
        ranks = range(outer * inner)
        own = [slice(*(starts[to] + each for each in bounds(rank, to, index))) for to in ranks]
        sent = torch.cat([rows[each] for each in own])
        # To each node what its ranks get; from each node, what the rank at this place has for the ranks of this node.
        to_node = [sum(size(rank, other * inner + to, index) for to in range(inner)) for other in range(outer)]
        across = [
            [size(other * inner + place, node * inner + to, index) for to in range(inner)] for other in range(outer)
        ]
        passing = rows.new_empty(sum(map(sum, across)), *rows.shape[1:])
        to_place = [sum(each) for each in zip(*across, strict=True)]
        inside = [[size(other * inner + at, rank, index) for other in range(outer)] for at in range(inner)]
        received = rows.new_empty(sum(map(sum, inside)), *rows.shape[1:])

        def pass_on() -> dist.Work | None:
            blocks = passing.split(
                [each for of_node in across for each in of_node]
            )  # node by node, to each rank of this one
            sorted_rows = torch.cat([blocks[other * inner + to] for to in range(inner) for other in range(outer)])
            return dist.all_to_all_single(
                received, sorted_rows, [sum(each) for each in inside], to_place, group=hops.inner, async_op=True
            )

        def copy_out() -> None:
            blocks = received.split([each for of_place in inside for each in of_place])
            for at in range(inner):
                for other in range(outer):
                    sender = other * inner + at
                    start, end = bounds(sender, rank, index)
                    out[arrives[sender] + start : arrives[sender] + end] = blocks[at * outer + other]

        return _Chunk(
            hops=[
                lambda: dist.all_to_all_single(
                    passing, sent, [sum(each) for each in across], to_node, group=hops.outer, async_op=True
                ),
                pass_on,
            ],
            end=copy_out,
        )

    _run([partial(chunk, index) for index in range(chunks)], 2)
    return out


def _elements(tensor: Tensor, chunk_bytes: int | None) -> tuple[int, ...]:
    """The elements of each chunk of a tensor."""
    return tuple(size // tensor.itemsize for size in chunks_of(tensor.numel() * tensor.itemsize, chunk_bytes))


def _bounded(chunk: Callable[[int, int], _Chunk], sizes: Sequence[int]) -> list[Callable[[], _Chunk]]:
    """Of each chunk what makes it, from its start to its end in the message."""

    def made(start: int, end: int) -> Callable[[], _Chunk]:
        return lambda: chunk(start, end)

    return [made(start, end) for start, end in pairwise([0, *accumulate(sizes)])]
