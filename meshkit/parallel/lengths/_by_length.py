"""Documents on as few ranks as balance allows: largest first, whole on the emptiest rank, else cut to fill what is left.

Every rank may work for `limit_s` seconds; the least limit in which all documents find room is searched (MULTIFIT). A document
that no rank can take whole fills up the ranks with the most room, those of one node where it fits there. Since a document
can be cut anywhere, all that limits the balance is what is received for the cuts.
Source: LPT of Graham 1969; MULTIFIT of Coffman, Garey & Johnson 1978; cutting what does not fit, McNaughton 1959.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

import numpy as np

from meshkit.parallel.lengths._costs import LengthCosts
from meshkit.parallel.lengths._even import even_groups, placed_evenly
from meshkit.parallel.lengths._plan import Numbers, Placed, Shares, keys_received

PRECISION = 0.01  # to which the least limit is searched


def spread_by_length(
    lengths: Numbers, areas: Numbers, *, ranks: int, microbatches: int, costs: LengthCosts, tokens_per_rank: int
) -> Placed | None:
    """(microbatch, shares) of each document for ranks that wait for each other at the end only; None where no limit helps.

    tokens_per_rank: the most in a microbatch. What takes longer than static groups of any size is not taken: where the
    memory is nearly full, ranks need about the same mixture of documents, which those have.
    """
    per_token = costs.pair_s * areas / np.maximum(lengths, 1) + costs.token_s
    order = np.argsort(-per_token * lengths, kind="stable").tolist()
    mean = float((per_token * lengths).sum()) / ranks

    def within(limit_s: float) -> Placed | None:
        return _place(order, lengths, per_token, _Rooms(ranks, microbatches, limit_s, tokens_per_rank, costs))

    static_s, static = _best_static(lengths, areas, ranks, costs, tokens_per_rank if microbatches == 1 else 0)
    enough_s = ranks * mean + float(lengths.sum()) * costs.far_s  # for all of it: then tokens are what is short
    low, high = mean, mean * (1 + PRECISION)
    while (best := within(high)) is None:
        if high > min(static_s, enough_s):
            return static
        low, high = high, high + 2 * (high - low)
    while high > low * (1 + PRECISION):
        middle = (low + high) / 2
        if (placed := within(middle)) is None:
            low = middle
        else:
            best, high = placed, middle
    return best if static is None or high <= static_s * (1 + PRECISION) else static


def _best_static(
    lengths: Numbers, areas: Numbers, ranks: int, costs: LengthCosts, tokens_per_rank: int
) -> tuple[float, Placed | None]:
    """(seconds, places) of the fastest groups of one size."""
    best: tuple[float, list[int], int] | None = None
    for size in (size for size in range(1, ranks + 1) if ranks % size == 0):
        found = even_groups(lengths, areas, ranks=ranks, size=size, costs=costs, tokens_per_rank=tokens_per_rank)
        if found is not None and (best is None or found[0] < best[0]):
            best = (*found, size)
    return (float("inf"), None) if best is None else (best[0], placed_evenly(lengths, *best[1:]))


def _place(order: list[int], lengths: Numbers, per_token: Numbers, rooms: _Rooms) -> Placed | None:
    placed: Placed = [(0, ())] * len(lengths)
    tokens_of, seconds_of = lengths.astype(int).tolist(), per_token.tolist()
    for index in order:
        if tokens_of[index]:
            place = rooms.take(tokens_of[index], seconds_of[index])
            if place is None:
                return None
            placed[index] = place
    return placed


class _Rooms:
    """What each rank has left: seconds of the step, and tokens of each microbatch."""

    def __init__(self, ranks: int, microbatches: int, limit_s: float, tokens_per_rank: int, costs: LengthCosts) -> None:
        self.costs, self.ranks = costs, ranks
        self.seconds = np.full(ranks, limit_s)
        self.tokens = np.full((microbatches, ranks), tokens_per_rank, dtype=np.int64)
        self.emptiest = [(-limit_s, rank) for rank in range(ranks)]  # a heap; entries that are out of date are dropped

    def take(self, tokens: int, token_s: float) -> tuple[int, Shares] | None:
        """Give a document its place; None where there is none."""
        return self._whole(tokens, token_s) or self._cut(tokens, token_s)

    def _whole(self, tokens: int, token_s: float) -> tuple[int, Shares] | None:
        full: list[tuple[float, int]] = []  # ranks with seconds, but without tokens
        place = None
        while self.emptiest and place is None:
            room, rank = self.emptiest[0]
            if -room != self.seconds[rank]:
                heappop(self.emptiest)
            elif -room < tokens * token_s:
                break
            elif self.tokens[microbatch := int(self.tokens[:, rank].argmax()), rank] < tokens:
                full.append(heappop(self.emptiest))
            else:
                self.seconds[rank] -= tokens * token_s
                self.tokens[microbatch, rank] -= tokens
                heapreplace(self.emptiest, (-self.seconds[rank], rank))
                place = microbatch, ((rank, tokens),)
        for entry in full:
            heappush(self.emptiest, entry)
        return place

    def _cut(self, tokens: int, token_s: float) -> tuple[int, Shares] | None:
        # In the first microbatch with room: there all ranks begin together, and none waits for another's keys.
        for microbatch in range(len(self.tokens)):
            for find in (self._of_one_node, self._of_nodes):
                candidates, key_s = find(tokens, token_s, microbatch)
                shares = self._fill(tokens, token_s, key_s, candidates, microbatch)
                if shares:
                    return microbatch, shares
        return None

    def _of_one_node(self, tokens: int, token_s: float, microbatch: int) -> tuple[Sequence[int], float]:
        """(ranks of a node in the order in which they are filled, seconds of a key): the node that needs the fewest, and of
        such the emptiest; no ranks where none suffices."""
        key_s = self.costs.near_s
        room = self._room(token_s, key_s * tokens, microbatch)
        inside = room.sum(1)
        if inside.max() < tokens:
            return (), key_s
        needed = (np.cumsum(-np.sort(-room, 1), 1) < tokens).sum(1) - inside / (2 * inside.max())
        needed[inside < tokens] = np.inf
        best = int(needed.argmin())
        return (best * room.shape[1] + np.argsort(-room[best], kind="stable")).tolist(), key_s

    def _of_nodes(self, tokens: int, token_s: float, microbatch: int) -> tuple[Sequence[int], float]:
        """The same of all ranks, the emptiest nodes first."""
        near_s, far_s = self.costs.near_s, self.costs.far_s
        room = self._room(token_s, far_s * tokens, microbatch)
        by_node = np.argsort(-room.sum(1), kind="stable")
        inner = np.argsort(-room, 1, kind="stable")
        # Of so many nodes each has its part of the keys near.
        nodes = int((np.cumsum(room.sum(1)[by_node]) < tokens).sum()) + 1
        key_s = far_s + (near_s - far_s) / nodes
        return (by_node[:, None] * room.shape[1] + inner[by_node]).ravel().tolist(), key_s

    def _room(self, token_s: float, received_s: float, microbatch: int) -> Numbers:
        """[node, rank of it]: the tokens that each can take, who receives three quarters of the document on average."""
        node = min(self.costs.node, self.ranks)
        room = np.minimum((self.seconds - 0.75 * received_s) / token_s, self.tokens[microbatch]).clip(0)
        return np.pad(room, (0, -len(room) % node)).reshape(-1, node)

    def _fill(self, tokens: int, token_s: float, key_s: float, candidates: Sequence[int], microbatch: int) -> Shares:
        """As much on each of the candidates as it has seconds for; empty where they do not suffice."""
        shares: list[tuple[int, int]] = []
        done = 0
        for rank in candidates:
            if done == tokens:
                break
            if rank >= self.ranks:  # of the last node, which has fewer
                continue
            # With x tokens it receives those behind its own and the first halves of those before: see `keys_received`.
            room_s = float(self.seconds[rank]) - key_s * (tokens - done / 2)
            most = min(int(self.tokens[microbatch, rank]), tokens - done)
            if room_s <= 0 or not most:
                continue
            share = most if token_s <= key_s else min(most, int(room_s / (token_s - key_s)))
            if share > 0:
                shares.append((rank, share))
                done += share
        if done < tokens:
            return ()
        near_s, far_s = self.costs.near_s, self.costs.far_s
        for (rank, share), (_, near, far) in zip(shares, keys_received(shares, self.costs.node), strict=False):
            self.seconds[rank] -= share * token_s + near * near_s + far * far_s
            self.tokens[microbatch, rank] -= share
            heappush(self.emptiest, (-self.seconds[rank], rank))
        return tuple(shares)
