"""Bring fields of samples from the ranks of one mesh to those of another."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshkit.algos.dataflow._call import SOURCE, Sample
from meshkit.core.sharding import even_part
from meshkit.errors import DataError

DataRanks = Sequence[Sequence[int]]
"""of a mesh: for each data rank the ranks of the world that have its samples"""


def share(sources: int, data_ranks: DataRanks, rank: int) -> range:
    """Which of the iteration's first samples are those of `rank`; none for a rank outside of the mesh."""
    for index, ranks in enumerate(data_ranks):
        if rank in ranks:
            return even_part(sources, len(data_ranks), index)
    return range(0)


class Exchange:
    """The way from one mesh to another. group: a gloo group of the ranks of both, since samples lie on the host."""

    def __init__(self, source: DataRanks, destination: DataRanks, group: ProcessGroup) -> None:
        self._source, self._destination, self._group = source, destination, group
        self.ranks = dist.get_process_group_ranks(group)

    def send(self, samples: Sequence[Sample], fields: Sequence[str], sources: int) -> list[Sample]:
        """The samples of this rank at the destination, with `fields` and their source alone; [] for a rank not of it.

        samples: those of this rank at the source. sources: how many first samples the iteration has.
        Each receiver gets each sample once, from itself where it has it.
        Wire: two all-to-alls over the ranks of both meshes: sizes, and pickled samples.
        """
        rank = dist.get_rank()
        names = (SOURCE, *fields)
        payloads = []
        for receiver in self.ranks:
            wanted = share(sources, self._destination, receiver)
            parts = [
                {name: sample[name] for name in names}
                for sample in samples
                if sample[SOURCE] in wanted and self._sender(sample[SOURCE], sources, receiver) == rank
            ]
            payloads.append(parts)
        own = payloads[self.ranks.index(rank)]
        payloads[self.ranks.index(rank)] = []
        received = [sample for parts in self._all_to_all(payloads) for sample in parts]
        return sorted([*received, *own], key=lambda sample: sample[SOURCE])  # stable: samples of one source in order

    def _sender(self, source: int, sources: int, receiver: int) -> int:
        """Of the ranks that have a sample, the receiver itself, or one by turns."""
        for index, ranks in enumerate(self._source):
            if source in even_part(sources, len(self._source), index):
                return receiver if receiver in ranks else ranks[receiver % len(ranks)]
        raise AssertionError(f"no rank has source {source} of {sources}")

    def _all_to_all(self, payloads: list[list[Sample]]) -> list[list[Sample]]:
        packed = [pickle.dumps(parts) if parts else b"" for parts in payloads]
        sizes = torch.tensor([len(data) for data in packed])
        theirs = torch.empty_like(sizes)
        dist.all_to_all_single(theirs, sizes, group=self._group)
        outgoing = torch.frombuffer(bytearray(b"".join(packed)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
        incoming = torch.empty(int(theirs.sum()), dtype=torch.uint8)
        dist.all_to_all_single(incoming, outgoing, theirs.tolist(), sizes.tolist(), group=self._group)
        return [_unpacked(part) for part in incoming.split(theirs.tolist())]


def _unpacked(part: Tensor) -> list[Sample]:
    samples: list[Sample] = pickle.loads(part.numpy().tobytes()) if part.numel() else []
    return samples


def merge(held: Sequence[Sample], received: Sequence[Sample], what: str) -> list[Sample]:
    """The received samples with what is held of them: one for one, or one held sample of a source for all received of it.

    Raises: DataError where the numbers fit neither way.
    """
    by_source: dict[int, list[Sample]] = {}
    for sample in held:
        by_source.setdefault(sample[SOURCE], []).append(sample)
    counts: dict[int, int] = {}
    for sample in received:
        counts[sample[SOURCE]] = counts.get(sample[SOURCE], 0) + 1
    merged, seen = [], dict.fromkeys(counts, 0)
    for sample in received:
        source = sample[SOURCE]
        own = by_source.get(source, [{}])
        if len(own) not in (1, counts[source]):
            raise DataError(
                f"{what}: {counts[source]} samples of source {source} come to {len(own)} that are there already. Let calls "
                "that add or drop samples run before their fields go to other meshes."
            )
        merged.append({**own[seen[source] if len(own) > 1 else 0], **sample})
        seen[source] += 1
    return merged
