"""Which rank of the `cp` axis holds which tokens.

Work of a rank: the (query, key) pairs that its queries see. Traffic of a rank: the keys that its queries see and that lie
on other ranks. An assignment fixes both before any attention runs. It is computed from integers alone, so every rank
computes the same one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import get_args

import numpy as np
import numpy.typing as npt

from meshkit.errors import PlanError
from meshkit.mask import Interval, Mask
from meshkit.strategy import Balance

Runs = tuple[Interval, ...]
"""the global tokens [first, after) of one rank in its local order: ascending, none empty, adjacent ones merged"""


Counts = npt.NDArray[np.int64]


def assign(mask: Mask, parts: int, *, balance: Balance, slack: float = 0.0) -> list[Runs]:
    """The runs of each of `parts` ranks, which together hold every token once; a rank may hold none.

    "contiguous" and "zigzag" look at the number of tokens only, "per_document" and "locality" at the mask too; slack is
    locality's.
    Raises: PlanError for another name.
    """
    if balance == "contiguous":
        return contiguous(mask.tokens, parts)
    if balance == "zigzag":
        return zigzag(mask.tokens, parts)
    if balance == "per_document":
        return per_document(mask, parts)
    if balance == "locality":
        return locality(mask, parts, slack=slack)
    raise PlanError(f"balance={balance!r} is not a way to share tokens. Choose one of {', '.join(get_args(Balance))}.")


def contiguous(tokens: int, parts: int) -> list[Runs]:
    """Rank r holds the r-th of `parts` stretches: the least traffic, and up to twice the mean work under causal masks."""
    return cut(merged([(0, tokens)]), parts)


def zigzag(tokens: int, parts: int) -> list[Runs]:
    """Rank r holds chunks r and 2 * parts - 1 - r of 2 * parts: equal work under one causal document.

    Source: Zhu 2024, ring-flash-attention; chunk edges are uneven where 2 * parts does not divide the tokens.
    """
    chunks = cut(merged([(0, tokens)]), 2 * parts)
    return [merged(chunks[rank] + chunks[-1 - rank]) for rank in range(parts)]


def per_document(mask: Mask, parts: int) -> list[Runs]:
    """Zigzag inside each component of the mask: equal work, and nearly every rank needs keys of every document.

    The tokens left over where 2 * parts does not divide a document are dealt to ranks one by one, continuing at the rank
    where the document before stopped (WLB-LLM), so token counts differ by at most one. A leftover token joins its rank's
    earlier chunk, where it sees fewer keys.
    """
    runs_of: list[list[Interval]] = [[] for _ in range(parts)]
    dealt = 0
    for first, after in intervals_of(mask):
        chunk_size, left = divmod(after - first, 2 * parts)
        sizes = [chunk_size] * (2 * parts)
        for index in range(left):
            sizes[(dealt + index) % parts] += 1
        dealt += left
        for chunk, edges in enumerate(pairwise(accumulate(sizes, initial=first))):
            runs_of[min(chunk, 2 * parts - 1 - chunk)].append(edges)
    return [merged(runs) for runs in runs_of]


def locality(mask: Mask, parts: int, *, slack: float = 0.0) -> list[Runs]:
    """Equal tokens and equal work with few cuts through documents: the least traffic that was found.

    Pieces of documents that no rank has yet are laid on a circle, those with little work per token first. Each rank in turn
    takes a window of its share of tokens whose work is its share too, so the rest keeps the same means. Such a window always
    exists: over all windows of one size the work averages to the mean, and from one window to the next it changes by at
    most one token's work. A window across the seam is best, since it joins the end of the longest document with whole short
    ones: a cut before token x of a causal document costs x keys once, and a whole document costs nothing. One causal
    document comes out as zigzag.
    slack: how far the busiest rank may exceed the mean work in order to send less (0.1 is 10 %). Among the windows within
    it that begin or end between documents, a rank takes the one that needs the fewest keys from other ranks.
    """
    seen = _keys_seen(mask)
    step = int(seen.max(initial=0))  # the work of a window changes by no more between neighbours
    limit = (1 + slack) * int(seen.sum()) / parts  # over the mean of all ranks, not of those left
    pieces = intervals_of(mask)
    assignment: list[Runs] = []
    for rank in range(parts):
        pieces.sort(key=lambda piece: (seen[piece[1] - 1], piece[1] - piece[0], piece))
        size = _size(pieces) // (parts - rank)
        windows = [_window(pieces, size, seen, step=step)]
        if slack > 0:
            windows += _whole_windows(pieces, size, seen, limit, limit * (parts - rank - 1))
        taken, pieces = min(windows, key=lambda window: received(mask, [merged(window[0])]))
        assignment.append(merged(taken))
    return assignment


def cut(runs: Sequence[Interval], parts: int) -> list[Runs]:
    """Runs in `parts` consecutive shares whose sizes differ by at most one token: inner ranks of Ulysses x ring."""
    # Consecutive, so that neighbouring tokens stay together: runs are few, and so are tiles.
    tokens, rest = _size(runs), list(runs)
    shares: list[Runs] = []
    for low, high in pairwise(part * tokens // parts for part in range(parts + 1)):
        share, rest = _split(rest, high - low)
        shares.append(tuple(share))
    return shares


def work(mask: Mask, assignment: Sequence[Runs]) -> list[int]:
    """Visible pairs of the queries each rank holds."""
    before = visible_before(mask)
    return [sum(int(before[after] - before[first]) for first, after in runs) for runs in assignment]


def visible_before(mask: Mask) -> Counts:
    """Visible pairs of the queries before each token, [tokens + 1]: the work of a run is one difference, at any length."""
    return np.concatenate([[0], np.cumsum(_keys_seen(mask))])


def keys_needed(mask: Mask, runs: Runs) -> Runs:
    """The keys that the queries of these runs see, on whichever rank they lie."""
    # In order of their first query the bands that a run may meet lie together, and are found by bisection: a packed batch has
    # many, and `locality` asks for each candidate.
    bands = sorted(mask.bands)
    firsts = [band.q0 for band in bands]
    reach = list(accumulate((band.q1 for band in bands), max))  # no band up to here has later queries
    needed: list[Interval] = []
    for run in runs:
        for band in bands[bisect_right(reach, run[0]) : bisect_left(firsts, run[1])]:
            if (clipped := band.clip(run, (0, mask.tokens))) is not None:
                needed.append(
                    (clipped.k0, clipped.k1)
                )  # without gaps, since neighbouring queries see neighbouring keys
    return merged(needed)


def received(mask: Mask, assignment: Sequence[Runs]) -> list[int]:
    """How many keys of other ranks each rank needs. (A full ring sends it all keys of other ranks, needed or not.)"""
    return [_size(merged(keys_needed(mask, runs) + runs)) - _size(runs) for runs in assignment]


def _keys_seen(mask: Mask) -> Counts:
    """How many keys each token sees, [tokens]."""
    seen = np.zeros(mask.tokens, dtype=np.int64)
    for q0, q1, k0, k1, low, high in mask.bands:
        query = np.arange(q0, q1)
        seen[q0:q1] += np.maximum(np.minimum(k1, query + high + 1) - np.maximum(k0, query + low), 0)
    return seen


def intervals_of(mask: Mask) -> list[Interval]:
    """The mask's components, and the stretches between them: tokens that see nothing and only even out token counts."""
    edges = sorted({0, mask.tokens}.union(*mask.components))
    return list(pairwise(edges))


def _window(pieces: list[Interval], size: int, seen: Counts, *, step: int) -> tuple[list[Interval], list[Interval]]:
    """(`size` tokens of the circle with their share of its work, the other tokens); across the seam where possible."""
    tokens = _size(pieces)
    front, back = _split(pieces, tokens - size)
    # The circle is turned so that window 0 ends at the seam and window `size` begins at it; those between lie across it.
    turned = back + front
    excess = _values(seen, back).sum() - int(_values(seen, pieces).sum()) * size // max(tokens, 1)
    for windows in (size, tokens):
        enters, leaves = (_values(seen, _split(circle, windows)[0]) for circle in (pieces, turned))
        gap = np.abs(np.concatenate([[0], np.cumsum(enters - leaves)]) + excess)
        first = int(gap.argmin())
        # Work changes by at most `step` from window to window, so where it crosses the share some window is within half.
        if 2 * gap[first] <= step + 1:
            break
    before, after = _split(pieces, (tokens - size + first) % max(tokens, 1))
    return _split(after + before, size)


def _whole_windows(
    pieces: list[Interval], size: int, seen: Counts, limit: float, limit_of_rest: float
) -> list[tuple[list[Interval], list[Interval]]]:
    """(window, rest) for windows of `size` tokens that begin or end between pieces, if neither has too much work.

    limit: the most work of the window; limit_of_rest: of all other tokens, which further ranks share.
    """
    tokens = _size(pieces)
    edges = [0, *accumulate(after - first for first, after in pieces[:-1])]
    starts = sorted({edge % tokens for edge in edges} | {(edge - size) % tokens for edge in edges}) if tokens else []
    work_to = np.concatenate([[0], np.cumsum(_values(seen, [*pieces, *pieces]))])
    windows = []
    for start in starts:
        load = int(work_to[start + size] - work_to[start])
        if load <= limit and int(work_to[tokens]) - load <= limit_of_rest:
            before, after = _split(pieces, start)
            windows.append(_split(after + before, size))
    return windows


def _values(seen: Counts, pieces: Iterable[Interval]) -> Counts:
    return np.concatenate([seen[:0], *(seen[first:after] for first, after in pieces)])


def _split(pieces: Sequence[Interval], count: int) -> tuple[list[Interval], list[Interval]]:
    """The first `count` tokens, and the others."""
    for index, (first, after) in enumerate(pieces):
        if count < after - first:
            middle = first + count
            head = [(first, middle)] if count else []
            return [*pieces[:index], *head], [(middle, after), *pieces[index + 1 :]]
        count -= after - first
    return list(pieces), []


def merged(intervals: Iterable[Interval]) -> Runs:
    """The union, ascending and without empty intervals."""
    union: list[Interval] = []
    for first, after in sorted(intervals):
        if union and first <= union[-1][1]:
            union[-1] = (union[-1][0], max(after, union[-1][1]))
        elif first < after:
            union.append((first, after))
    return tuple(union)


def _size(intervals: Iterable[Interval]) -> int:
    return sum(after - first for first, after in intervals)
