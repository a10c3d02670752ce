"""Resharding, the plan: which rank sends which region to which, decided from two layouts, the same on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    """A box of one tensor, from the rank `sender` to the rank `receiver` of the world, in `dtype`."""

    name: str
    region: Region
    sender: int
    receiver: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return volume(self.region) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ReallocationPlan:
    """The transfers from one layout of tensors to another. Print it.

    rounds: transfers in flight at the same time; in a round no rank sends and receives more than `bucket_bytes` together.
    copies: within a rank, which already has the region.
    lower_bound_bytes: summed over receivers, the bytes to hold that they do not hold yet, in the narrower of the two dtypes.
    ranks_per_node: senders on the receiver's node are preferred.
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

    Of several senders, one on the receiver's node is taken, and of those the one that has sent least so far.
    Messages are in the narrower dtype of the two; with `exact` in the source's, for a receiver that computes with it.
    Raises: PlanError for two different models, naming the first tensor that differs, and for a source with gaps.
    """
    _refuse_other_model(src, dst)
    sent: Counter[int] = Counter()
    copies: list[Transfer] = []
    moving: list[Transfer] = []
    bound = 0
    for name, want in dst.tensors.items():
        have = src.tensors[name]
        # Rounding before or after the wire gives the same values in the destination; before, it sends fewer bytes.
        dtype = have.dtype if exact or want.dtype.itemsize >= have.dtype.itemsize else want.dtype
        # By distinct region, not by rank: replicas hold the same boxes, and thousands of ranks would be compared with each
        # other.
        cells = _holders(have)
        for region, receivers in _holders(want).items():
            boxes = [(box, holders) for cell, holders in cells.items() if (box := intersect(region, cell)) is not None]
            # Distinct regions of a layout do not overlap, so volumes may be added up.
            missing = volume(region) - sum(volume(box) for box, _ in boxes)
            if missing:
                raise PlanError(_gap(name, have, missing))
            for receiver in receivers:
                local = intersect(region, have.regions[receiver]) if receiver in have.regions else None
                bound += (volume(region) - (volume(local) if local is not None else 0)) * dtype.itemsize
                for box, holders in boxes:
                    # Decided in one order on every rank, from equal data: nobody has to be asked.
                    sender = receiver if receiver in holders else _sender(holders, receiver, sent, ranks_per_node)
                    transfer = Transfer(name, box, sender, receiver, dtype)
                    if sender == receiver:
                        copies.append(transfer)
                    else:
                        moving.append(transfer)
                        sent[sender] += transfer.bytes
    return ReallocationPlan(
        rounds=_rounds(moving, bucket_bytes),
        copies=tuple(piece for copy in copies for piece in _pieces(copy, bucket_bytes)),
        lower_bound_bytes=bound,
        bucket_bytes=bucket_bytes,
        ranks_per_node=ranks_per_node,
    )


def _holders(tensor: TensorRegions) -> dict[Region, list[int]]:
    """The distinct regions of a tensor, and the ranks that hold each."""
    cells: dict[Region, list[int]] = {}
    for rank, region in tensor.regions.items():
        cells.setdefault(region, []).append(rank)
    return cells


def _sender(holders: Sequence[int], receiver: int, sent: Counter[int], ranks_per_node: int) -> int:
    # The lowest rank last, as a tie-break: the plan must not depend on the order of a dict.
    node = receiver // ranks_per_node
    return min(holders, key=lambda rank: (rank // ranks_per_node != node, sent[rank], rank))


def _pieces(transfer: Transfer, bucket_bytes: int) -> Iterator[Transfer]:
    """Parts of at most a quarter of a bucket, so that buckets fill up well."""
    for region in split(transfer.region, max(1, bucket_bytes // 4 // transfer.dtype.itemsize)):
        yield Transfer(transfer.name, region, transfer.sender, transfer.receiver, transfer.dtype)


def _rounds(moving: Sequence[Transfer], bucket_bytes: int) -> tuple[tuple[Transfer, ...], ...]:
    """Put each piece into the first round in which both of its ranks have room; rounds nearly full for a rank are skipped."""
    # `first[rank]` is the first round with room for more on a rank. Rounds more than three quarters full are passed over for
    # good, since a piece is up to a quarter of a bucket; else each piece would search all rounds.
    rounds: list[list[Transfer]] = []
    used: list[Counter[int]] = []
    first: Counter[int] = Counter()
    for piece in (piece for transfer in moving for piece in _pieces(transfer, bucket_bytes)):
        ends, size = (piece.sender, piece.receiver), piece.bytes
        number = max(first[end] for end in ends)
        while number < len(rounds) and any(used[number][end] + size > bucket_bytes for end in ends):
            number += 1
        if number == len(rounds):
            rounds.append([])
            used.append(Counter())
        rounds[number].append(piece)
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
