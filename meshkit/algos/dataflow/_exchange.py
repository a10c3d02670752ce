"""Exchange of samples (all-to-all): fields from the ranks of one mesh to those of another."""

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
"""for each data rank of a mesh, the ranks of the world that have its samples"""


def share(sources: int, data_ranks: DataRanks, rank: int) -> range:
    """The first samples of an iteration that are on `rank`, as indices; none for a rank outside of the mesh."""
    for index, ranks in enumerate(data_ranks):
        if rank in ranks:
            # The same split as of `Flow.source`: nobody has to be told where a sample is.
            return even_part(sources, len(data_ranks), index)
    return range(0)


class Exchange:
    """Sends samples from one mesh to another. group: a gloo group of the ranks of both, since samples are on the host."""

    def __init__(self, source: DataRanks, destination: DataRanks, group: ProcessGroup) -> None:
        self._source, self._destination, self._group = source, destination, group
        self.ranks = dist.get_process_group_ranks(group)

    def send(self, samples: Sequence[Sample], fields: Sequence[str], sources: int) -> list[Sample]:
        """Returns the samples of this rank on the destination mesh, with `fields` and `source` only; [] on other ranks.

        samples: those of this rank on the source mesh. sources: how many first samples the iteration has.
        Each receiver gets each sample once, from itself if it has it.
        Wire: two all-to-alls over the ranks of both meshes: sizes, and pickled samples.
        """
        rank = dist.get_rank()
        names = (SOURCE, *fields)
        payloads = []
        for receiver in self.ranks:
            # Each rank computes what every receiver lacks; no request is sent.
            wanted = share(sources, self._destination, receiver)
            parts = [
                {name: sample[name] for name in names}
                for sample in samples
                if sample[SOURCE] in wanted and self._sender(sample[SOURCE], sources, receiver) == rank
            ]
            payloads.append(parts)
        # What stays on the rank is neither pickled nor copied.
        local = payloads[self.ranks.index(rank)]
        payloads[self.ranks.index(rank)] = []
        received = [sample for parts in self._all_to_all(payloads) for sample in parts]
        return sorted([*received, *local], key=lambda sample: sample[SOURCE])  # stable: samples of one source in order

    def _sender(self, source: int, sources: int, receiver: int) -> int:
        """The receiver itself, if it has the sample, else one of the ranks that have it, in turn by receiver."""
        for index, ranks in enumerate(self._source):
            if source in even_part(sources, len(self._source), index):
                # In turn: all samples from the first rank would make it the bottleneck of the exchange.
                return receiver if receiver in ranks else ranks[receiver % len(ranks)]
        raise AssertionError(f"no rank has source {source} of {sources}")

    def _all_to_all(self, payloads: list[list[Sample]]) -> list[list[Sample]]:
        packed = [pickle.dumps(parts) if parts else b"" for parts in payloads]
        sizes = torch.tensor([len(data) for data in packed])
        incoming_sizes = torch.empty_like(sizes)
        # Sizes first, since a receiver must make its buffer.
        dist.all_to_all_single(incoming_sizes, sizes, group=self._group)
        # frombuffer refuses an empty buffer: one byte stands in, and is cut off.
        outgoing = torch.frombuffer(bytearray(b"".join(packed)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
        incoming = torch.empty(int(incoming_sizes.sum()), dtype=torch.uint8)
        dist.all_to_all_single(incoming, outgoing, incoming_sizes.tolist(), sizes.tolist(), group=self._group)
        return [_unpacked(part) for part in incoming.split(incoming_sizes.tolist())]


def _unpacked(part: Tensor) -> list[Sample]:
    samples: list[Sample] = pickle.loads(part.numpy().tobytes()) if part.numel() else []
    return samples


def merge(present: Sequence[Sample], received: Sequence[Sample], what: str) -> list[Sample]:
    """Add the fields of samples that are already on the rank to the received ones, by source.

    Samples of one source are merged one to one; or, if only one of it is present, that one into all received ones.
    Raises: DataError where the numbers fit neither way.
    """
    by_source: dict[int, list[Sample]] = {}
    for sample in present:
        by_source.setdefault(sample[SOURCE], []).append(sample)
    counts: dict[int, int] = {}
    for sample in received:
        counts[sample[SOURCE]] = counts.get(sample[SOURCE], 0) + 1
    merged, seen = [], dict.fromkeys(counts, 0)
    for sample in received:
        source = sample[SOURCE]
        partners = by_source.get(source, [{}])
        if len(partners) not in (1, counts[source]):
            raise DataError(
                f"{what}: {counts[source]} samples of source {source} come to {len(partners)} that are there already. Let "
                "calls that add or drop samples run before their fields go to other meshes."
            )
        merged.append({**partners[seen[source] if len(partners) > 1 else 0], **sample})
        seen[source] += 1
    return merged
