"""Pieces of documents on the ranks of cp, for recurrent mixers: which piece goes on from which, and what tokens lie before.

A rank's tokens may be any runs of the stream (contiguous, zigzag, whole documents). A piece is what a rank has of a document
without a gap; its state comes from the piece before it in the document, on whichever rank that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshkit.core.document_chunks import Places, cut_documents, documents_of
from meshkit.mask import Interval
from meshkit.parallel.context._layout import Layout


@dataclass(frozen=True)
class Piece:
    """Tokens [first, after) of the stream, on `rank` from `offset` on. begins: whether its document begins with it."""

    first: int
    after: int
    rank: int
    offset: int
    begins: bool

    @property
    def local(self) -> Interval:
        return self.offset, self.offset + self.after - self.first


@lru_cache(maxsize=128)
def pieces_of(layout: Layout) -> tuple[Piece, ...]:
    """All pieces in the order of the tokens. Raises: PlanError for a mask that is no more than packed causal documents."""
    documents = documents_of(layout.mask)
    begins = {first for first, _ in documents}
    found: list[Piece] = []
    for first, after, rank, offset in _runs(layout):
        for start, end in cut_documents(documents, (first, after)):
            own = Piece(start, end, rank, offset + start - first, start in begins)
            last = found[-1] if found else None
            joins = last is not None and not own.begins and last.rank == rank and last.local[1] == own.offset
            if last is not None and joins:
                found[-1] = Piece(last.first, end, rank, last.offset, last.begins)
            else:
                found.append(own)
    return tuple(found)


def _runs(layout: Layout) -> list[tuple[int, int, int, int]]:
    """(first, after, rank, offset in the rank's tensors) of every run of tokens, in order."""
    runs = []
    for rank, of_rank in enumerate(layout.runs):
        offset = 0
        for first, after in of_rank:
            runs.append((first, after, rank, offset))
            offset += after - first
    return sorted(run for run in runs if run[0] < run[1])


@dataclass(frozen=True)
class Hop:
    """A piece of this rank on the way of a state. number: of the piece among the rank's own, in the order of the tokens.
    source, target: the ranks that its state comes from and goes to; None where the document begins, and where it ends.
    depth: how many messages the state has made when it arrives; so many rounds go before."""

    number: int
    source: int | None
    target: int | None
    depth: int
    target_depth: int


@lru_cache(maxsize=256)
def hops_of(layout: Layout, rank: int, *, backward: bool = False) -> tuple[Hop, ...]:
    """The way of the states, or of their gradients, over this rank's pieces, in the order in which they pass."""
    pieces = pieces_of(layout)
    order = range(len(pieces))[::-1] if backward else range(len(pieces))
    linked = {at: at + 1 for at in range(len(pieces) - 1) if not pieces[at + 1].begins}
    sources = linked if backward else {after: at for at, after in linked.items()}
    targets = {source: at for at, source in sources.items()}
    depth: dict[int, int] = {}
    for at in order:
        source = sources.get(at)
        depth[at] = 0 if source is None else depth[source] + (pieces[source].rank != pieces[at].rank)
    own = [at for at in range(len(pieces)) if pieces[at].rank == rank]
    numbers = {at: number for number, at in enumerate(own)}

    def rank_of(at: int | None) -> int | None:
        return None if at is None else pieces[at].rank

    return tuple(
        Hop(
            numbers[at],
            rank_of(sources.get(at)),
            rank_of(targets.get(at)),
            depth[at],
            depth.get(targets.get(at, -1), 0),
        )
        for at in order
        if at in numbers
    )


def chain_of(layout: Layout) -> tuple[int, int]:
    """(states that all ranks send for one scan, messages one after another)."""
    hops = [hop for rank in range(layout.ranks) for hop in hops_of(layout, rank)]
    sent = sum(hop.target is not None and hop.depth != hop.target_depth for hop in hops)
    return sent, max((hop.depth for hop in hops), default=0)


@dataclass(frozen=True)
class Halo:
    """The tokens before each piece of a rank that a short convolution reads.

    sends: (to rank, own tokens); receives: (from rank, how many). index: of the stream that is convolved, in the rank's
    tokens with those received after them; places: of each token in the stream. See `convolved`.
    """

    sends: tuple[tuple[int, tuple[int, ...]], ...]
    receives: tuple[tuple[int, int], ...]
    index: Places
    places: Places

    @property
    def received(self) -> int:
        return sum(count for _, count in self.receives)


@lru_cache(maxsize=256)
def halo_of(layout: Layout, rank: int, width: int) -> Halo:
    """The halo of one rank, of a convolution over `width` tokens. A sender computes what its receivers read."""
    pieces = pieces_of(layout)
    tokens = layout.lengths[rank]
    before = {at: _before(pieces, at, width - 1) for at in range(len(pieces))}
    sends: dict[int, list[int]] = {}
    received: dict[int, list[tuple[int, int]]] = {}  # by sender: (piece, slot)
    for at, places in before.items():
        for slot, (owner, token) in enumerate(places):
            if owner == rank != pieces[at].rank:
                sends.setdefault(pieces[at].rank, []).append(token)
            elif owner != rank == pieces[at].rank:
                received.setdefault(owner, []).append((at, slot))
    senders = sorted(received)
    arrived = [each for sender in senders for each in received[sender]]
    where = {each: tokens + number for number, each in enumerate(arrived)}
    nothing = tokens + len(arrived)
    index, places_of = list[int](), dict[int, int]()
    for at, piece in enumerate(pieces):
        if piece.rank != rank:
            continue
        known = [where.get((at, slot), token) for slot, (_, token) in enumerate(before[at])]
        index += [nothing] * (width - 1 - len(known)) + known
        places_of |= {token: len(index) + token - piece.offset for token in range(*piece.local)}
        index += range(*piece.local)
    index = index or [nothing]  # a rank without tokens convolves zeros
    return Halo(
        tuple((to, tuple(sends[to])) for to in sorted(sends)),
        tuple((sender, len(received[sender])) for sender in senders),
        Places(index),
        Places([places_of.get(token, len(index)) for token in range(tokens)]),
    )


def _before(pieces: Sequence[Piece], at: int, count: int) -> list[tuple[int, int]]:
    """(rank, its local token) of up to `count` tokens of the document before a piece, in order."""
    found: list[tuple[int, int]] = []
    while not pieces[at].begins and len(found) < count:
        at -= 1
        first, after = pieces[at].local
        found = [(pieces[at].rank, token) for token in range(first, after)][len(found) - count :] + found
    return found
