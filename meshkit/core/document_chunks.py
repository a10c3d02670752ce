"""Packed documents cut into chunks of equal size (variable lengths without padding to the longest), for recurrences.

A piece is a run of tokens of one document that lie one after another in a tensor: a document, or what a rank has of it.
Chunks of all pieces are computed side by side; the state goes from a chunk to the next of its piece, and all pieces go on
together: step j is chunk j of every piece that has one, the longest pieces first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from meshkit.core import _torch
from meshkit.core.masked_attention import packed_documents
from meshkit.core.to_device import to_device
from meshkit.errors import PlanError
from meshkit.mask import Band, Interval, Mask


class Places:
    """Numbers that index a dim, kept between layers. Not as a tensor: one that was made without values would stay one."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = np.array(numbers, dtype=np.int64)

    def on(self, device: torch.device) -> Tensor:
        return to_device(torch.tensor(self._numbers), device)


@dataclass(frozen=True)
class Chunks:
    """index: [chunks * size], the token of each place, `tokens` for one without. places: [tokens], where each token is,
    chunks * size for one of no piece. steps: (first chunk, chunks) of each step. order: pieces from the longest on.
    """

    size: int
    index: Places
    places: Places
    steps: tuple[tuple[int, int], ...]
    order: tuple[int, ...]


@lru_cache(maxsize=32)
def chunks_of(pieces: tuple[Interval, ...], tokens: int, size: int) -> Chunks:
    """The chunks of pieces, each of at least one token, of a tensor of `tokens` tokens."""
    order = sorted(range(len(pieces)), key=lambda number: pieces[number][0] - pieces[number][1])
    index, places = list[int](), [0] * tokens
    steps, first, step = [], 0, 0
    while going := [pieces[number] for number in order if pieces[number][1] - pieces[number][0] > step * size]:
        for begin, after in going:
            own = range(begin + step * size, min(begin + (step + 1) * size, after))
            for place, token in enumerate(own, len(index)):
                places[token] = place + 1
            index += [*own, *[tokens] * (size - len(own))]
        steps.append((first, len(going)))
        first, step = first + len(going), step + 1
    # Of a token of no piece: the row of zeros after all places.
    places = [place - 1 if place else len(index) for place in places]
    return Chunks(size, Places(index), Places(places), tuple(steps), tuple(order))


def documents_of(mask: Mask) -> tuple[Interval, ...]:
    """The documents of a mask. Raises: PlanError for a mask that is no more than packed causal documents."""
    packed = packed_documents(mask)
    if packed is None or (packed.window is not None and packed.window < packed.longest):
        raise PlanError(
            "a recurrent mixer follows packed causal documents, but the mask is another one (a window, a prefix, padding "
            "that it hides). Use Mask.documents or position_ids, and put padding last with labels of -100."
        )
    return tuple(pairwise(packed.ends))


def one_document() -> Tensor:
    """The table of rows that are one document each, of whatever length."""
    with _torch.without_modes():
        return torch.empty((0, len(Band._fields)), dtype=torch.int64)


def documents_in(table: Tensor, tokens: int) -> tuple[Interval, ...]:
    """The documents of a `mask_table`; without bands one of all tokens."""
    with _torch.without_modes():  # it has values also where other tensors have none
        return _decoded(table.numpy().tobytes(), tokens)


@lru_cache(maxsize=128)
def _decoded(content: bytes, tokens: int) -> tuple[Interval, ...]:
    if not content:
        return ((0, tokens),) if tokens else ()
    values = torch.frombuffer(bytearray(content), dtype=torch.int64).view(-1, len(Band._fields)).tolist()
    return documents_of(Mask(tokens, tuple(Band(*row) for row in values)))


def cut_documents(documents: Sequence[Interval], run: Interval) -> list[Interval]:
    """The parts of documents that lie in a run of tokens."""
    cut = [(max(first, run[0]), min(after, run[1])) for first, after in documents]
    return [(first, after) for first, after in cut if first < after]
