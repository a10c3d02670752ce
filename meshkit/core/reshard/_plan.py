"""Resharding, the plan: which rank sends which region to which, decided from two layouts, the same on every rank."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from meshkit.core.reshard._layout import Layout, TensorRegions
from meshkit.core.reshard._region import Region, intersect, split, volume
from meshkit.errors import PlanError

DEFAULT_BUCKET_BYTES = 64 * 2**20
WIDEST_TABLE = 16  # ranks
LINKS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of one tensor, from the rank `sender` to the rank `receiver` of the world, in `dtype`.

    relayed: the sender does not hold it in the source; it has got it from another rank, in an earlier round.
    """

    name: str
    region: Region
    sender: int
    receiver: int
    dtype: torch.dtype
    relayed: bool = False

    @property
    def bytes(self) -> int:
        return volume(self.region) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ReallocationPlan:
    """The transfers from one layout of tensors to another. Print it.

    rounds: transfers in flight at the same time; in a round no rank sends and receives more than `bucket_bytes` together.
    copies: within a rank, which already has the region.
    lower_bound_bytes: summed over receivers, the bytes to hold that they do not hold yet, in the dtypes of the messages.
    ranks_per_node: each byte comes once to each node that lacks it, and goes on from there.
    """

    rounds: tuple[tuple[Transfer, ...], ...]
    copies: tuple[Transfer, ...]
    lower_bound_bytes: int
    bucket_bytes: int
    ranks_per_node: int

    @cached_property
    def links(self) -> Counter[tuple[int, int]]:
        """Bytes by (sender, receiver)."""
        links: Counter[tuple[int, int]] = Counter()
        for transfer in (transfer for transfers in self.rounds for transfer in transfers):
            links[transfer.sender, transfer.receiver] += transfer.bytes
        return links

    @property
    def bytes_moved(self) -> int:
        return self.links.total()

    @property
    def bytes_between_nodes(self) -> int:
        return sum(size for (a, b), size in self.links.items() if a // self.ranks_per_node != b // self.ranks_per_node)

    @property
    def bytes_local(self) -> int:
        return sum(copy.bytes for copy in self.copies)

    @property
    def messages(self) -> int:
        """One message for each pair of ranks in each round."""
        return sum(len({(transfer.sender, transfer.receiver) for transfer in transfers}) for transfers in self.rounds)

    def __str__(self) -> str:
        return _text(self)


def plan_reallocation(
    src: Layout,
    dst: Layout,
    *,
    exact: bool = False,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ranks_per_node: int = 8,
) -> ReallocationPlan:
    """Give every rank of `dst` its regions, each byte once: from itself if it has it in `src`, else from a rank that has.

    A node gets each byte once, from outside only what none of its ranks has, and its ranks give it to each other: ranks on
    it that have the byte in `src`, else the first to get it. Nodes that have got a byte send it on to others (a tree), so
    that no node sends to all of them. Of several senders the one that has sent least so far is taken.
    Messages are in the narrower dtype of the two; with `exact` in the source's, for a receiver that computes with it, and
    what is passed on then is what the relay has computed, in its own dtype.
    Raises: PlanError for two different models, naming the first tensor that differs, and for a source with gaps.
    """
    _refuse_other_model(src, dst)
    routes = _Routes(ranks_per_node)
    for name, want in dst.tensors.items():
        have = src.tensors[name]
        # Rounding before or after the wire gives the same values in the destination; before, it sends fewer bytes.
        dtype = have.dtype if exact or want.dtype.itemsize >= have.dtype.itemsize else want.dtype
        relay_dtype = want.dtype if exact else dtype
        # Pieces of at most a quarter of a bucket, so that buckets fill up well, and a relay sends while it receives.
        most = max(1, bucket_bytes // 4 // max(dtype.itemsize, relay_dtype.itemsize))
        # By distinct region, not by rank: replicas hold the same boxes, and thousands of ranks would be compared with each
        # other.
        cells = _holders(have)
        for region, receivers in _holders(want).items():
            boxes = [(box, holders) for cell, holders in cells.items() if (box := intersect(region, cell)) is not None]
            # Distinct regions of a layout do not overlap, so volumes may be added up.
            missing = volume(region) - sum(volume(box) for box, _ in boxes)
            if missing:
                raise PlanError(_gap(name, have, missing))
            for box, holders in boxes:
                for piece in split(box, most):
                    routes.deliver(Transfer(name, piece, -1, -1, dtype), holders, receivers, relay_dtype)
    return ReallocationPlan(
        rounds=_rounds(routes.moving, bucket_bytes),
        copies=tuple(routes.copies),
        lower_bound_bytes=sum(transfer.bytes for transfer in routes.moving),
        bucket_bytes=bucket_bytes,
        ranks_per_node=ranks_per_node,
    )


def _holders(tensor: TensorRegions) -> dict[Region, list[int]]:
    """The distinct regions of a tensor, and the ranks that hold each."""
    cells: dict[Region, list[int]] = {}
    for rank, region in tensor.regions.items():
        cells.setdefault(region, []).append(rank)
    return cells


class _Routes:
    """Chooses who sends. Decided in one order on every rank, from equal data: nobody has to be asked."""

    def __init__(self, ranks_per_node: int) -> None:
        self.copies: list[Transfer] = []
        self.moving: list[Transfer] = []
        """a relayed one after that which brings it"""
        self._ranks_per_node = ranks_per_node
        # Bytes so far by rank: sent in all, sent to other nodes, received from other nodes.
        self._sent: Counter[int] = Counter()
        self._sent_out: Counter[int] = Counter()
        self._from_outside: Counter[int] = Counter()

    def deliver(
        self, piece: Transfer, holders: Sequence[int], receivers: Sequence[int], relay_dtype: torch.dtype
    ) -> None:
        """Bring the box to each receiver. holders: the ranks that have it in the source."""
        has, lacking = self._by_node(holders), self._by_node(rank for rank in receivers if rank not in holders)
        self.copies += [replace(piece, sender=rank, receiver=rank) for rank in receivers if rank in holders]
        # The lowest rank last, as a tie-break: the plan must not depend on the order of a dict.
        outside = deque(sorted(holders, key=lambda rank: (self._sent_out[rank], rank)))
        for node, ranks in sorted(lacking.items()):
            near, relays = has.get(node, []), set[int]()
            if not near:
                # Ranks take turns as the relay of their node: each link out of it carries as much.
                relay = min(ranks, key=lambda rank: (self._from_outside[rank], rank))
                sender = outside.popleft()
                self._send(piece, sender, relay, None if sender in holders else relay_dtype)
                # Who has not sent it yet comes first: the tree is as deep as it must be for equal loads.
                outside += [relay, sender]
                near, relays = [relay], {relay}
            for receiver in ranks:
                if receiver not in relays:
                    sender = min(near, key=lambda rank: (self._sent[rank], rank))
                    self._send(piece, sender, receiver, relay_dtype if relays else None)

    def _by_node(self, ranks: Iterable[int]) -> dict[int, list[int]]:
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(rank // self._ranks_per_node, []).append(rank)
        return by_node

    def _send(self, piece: Transfer, sender: int, receiver: int, relay_dtype: torch.dtype | None) -> None:
        relayed = relay_dtype is not None
        transfer = Transfer(piece.name, piece.region, sender, receiver, relay_dtype or piece.dtype, relayed)
        self.moving.append(transfer)
        self._sent[sender] += transfer.bytes
        if sender // self._ranks_per_node != receiver // self._ranks_per_node:
            self._sent_out[sender] += transfer.bytes
            self._from_outside[receiver] += transfer.bytes


def _rounds(moving: Sequence[Transfer], bucket_bytes: int) -> tuple[tuple[Transfer, ...], ...]:
    """Put each piece into the first round in which both of its ranks have room, and after the one that brings it to a relay.

    Rounds nearly full for a rank are skipped.
    """
    # `first[rank]` is the first round with room for more on a rank. Rounds more than three quarters full are passed over for
    # good, since a piece is up to a quarter of a bucket; else each piece would search all rounds.
    rounds: list[list[Transfer]] = []
    used: list[Counter[int]] = []
    first: Counter[int] = Counter()
    arrived: dict[tuple[str, Region, int], int] = {}
    for piece in moving:
        ends, size = (piece.sender, piece.receiver), piece.bytes
        number = max(first[end] for end in ends)
        if piece.relayed:
            number = max(number, arrived[piece.name, piece.region, piece.sender] + 1)
        while number < len(rounds) and any(used[number][end] + size > bucket_bytes for end in ends):
            number += 1
        if number == len(rounds):
            rounds.append([])
            used.append(Counter())
        rounds[number].append(piece)
        arrived[piece.name, piece.region, piece.receiver] = number
        for end in ends:
            used[number][end] += size
            while first[end] < len(rounds) and used[first[end]][end] > bucket_bytes * 3 // 4:
                first[end] += 1
    return tuple(map(tuple, rounds))


def _refuse_other_model(src: Layout, dst: Layout) -> None:
    for name in [*dst.tensors, *src.tensors]:
        if name in src.tensors and name in dst.tensors:
            if src.tensors[name].shape == dst.tensors[name].shape:
                continue
            difference = f"{name!r} has shape {src.tensors[name].shape} there and {dst.tensors[name].shape} here"
        else:
            holder, other = ("source", "destination") if name in src.tensors else ("destination", "source")
            difference = f"only the {holder} has {name!r}, and the {other} does not"
        advice = "Build both from one configuration."
        if ".lora_" in name:
            advice = "Give both models the same adapters, or merge them by mk.lora.merge first."
        raise PlanError(f"reallocate: source and destination are different models: {difference}. {advice}")


def _gap(name: str, have: TensorRegions, missing: int) -> str:
    return (
        f"reallocate: the ranks {sorted(have.regions)} of the source do not hold each element of {name!r} {have.shape} once: "
        f"{missing} too few for a destination. A layout is of all ranks that hold the model."
    )


def _text(plan: ReallocationPlan) -> str:
    """Bytes beside the lower bound, then a table of sender by receiver, or for many ranks the busiest links."""
    moved, bound = plan.bytes_moved, plan.lower_bound_bytes
    ratio = f"{moved / bound:.2f}x" if bound else "nothing"
    lines = [
        f"moves {_size(moved)} in {plan.messages} messages and {len(plan.rounds)} rounds of at most "
        f"{_size(plan.bucket_bytes)} a rank",
        f"lower bound {_size(bound)} ({ratio}); {_size(plan.bytes_local)} are where they are needed, and only copied",
        f"within nodes {_size(moved - plan.bytes_between_nodes)}, between nodes {_size(plan.bytes_between_nodes)} "
        f"({plan.ranks_per_node} ranks per node)",
    ]
    senders, receivers = sorted({a for a, _ in plan.links}), sorted({b for _, b in plan.links})
    if not plan.links:
        return "\n".join(lines)
    most_sent = max((sum(plan.links[a, b] for b in receivers), a) for a in senders)
    most_received = max((sum(plan.links[a, b] for a in senders), b) for b in receivers)
    lines.append(
        f"busiest: rank {most_sent[1]} sends {_size(most_sent[0])}, rank {most_received[1]} receives "
        f"{_size(most_received[0])}"
    )
    if max(len(senders), len(receivers)) > WIDEST_TABLE:
        busy = plan.links.most_common(LINKS_SHOWN)
        lines += [f"{a:>5} -> {b:<5} {_size(moved)}" for (a, b), moved in busy]
        return "\n".join([*lines, f"... {len(plan.links)} links"])
    lines.append("from \\ to" + "".join(f"{rank:>11}" for rank in receivers))
    for sender in senders:
        cells = [plan.links[sender, receiver] for receiver in receivers]
        lines.append(f"{sender:>9}" + "".join(f"{_size(cell) if cell else '.':>11}" for cell in cells))
    return "\n".join(lines)


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
