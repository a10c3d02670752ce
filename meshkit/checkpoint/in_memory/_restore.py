"""Loading a checkpoint from the memory of the hosts, onto any mesh: who has what, whether it is whole, and who sends it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from meshkit.checkpoint._dcp import Index
from meshkit.checkpoint._snapshot import Snapshot, snapshot_of
from meshkit.checkpoint._values import decode, dtype_of
from meshkit.checkpoint.in_memory._slots import Found, Header, find, host_name, views
from meshkit.mesh import HostRanks

PIECE = 1 << 28  # bytes of a message, and of the device's memory that it takes

Chunk = tuple[str, tuple[int, ...]]
"""(key, offset in the full tensor)"""
Wish = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(key, offset of the chunk, offset in the chunk, lengths)"""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A checkpoint that is whole in the memory of the hosts.

    headers: by the rank that saved. servers: of each of these, the ranks that have its slot, sound. buffers: the slots that
    this rank serves.
    """

    headers: dict[int, Header]
    servers: dict[int, list[int]]
    buffers: dict[int, Tensor]
    hosts: list[str]

    @property
    def step(self) -> int:
        return self.headers[0].step

    @property
    def group(self) -> tuple[int, str, int]:
        return self.headers[0].group

    @property
    def origin(self) -> str:
        return self.headers[0].origin


def newest(folder: Path, origin: str, ranks: HostRanks) -> Kept | None:
    """The newest step of which the hosts have every rank's slot, whole and sound; None where there is none. Collective.

    A slot whose sum is another than it was is as good as none.
    """
    found = find(folder, origin)
    told = ranks.all_gather((host_name(), [(each.header.group, each.header.rank) for each in found]))
    hosts = [host for host, _ in told]
    there: dict[tuple[int, str, int], set[int]] = defaultdict(set)
    for _, slots in told:
        for which, saved in slots:
            there[which].add(saved)
    for which in sorted(there, reverse=True):
        if there[which] == {*range(which[-1])}:
            kept = _checked([each for each in found if each.header.group == which], hosts, ranks)
            if len(kept.headers) == which[-1]:
                return kept
    return None


def _checked(found: Sequence[Found], hosts: list[str], ranks: HostRanks) -> Kept:
    """Each rank looks at a share of the slots of its host."""
    me = ranks.rank
    neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[me]]
    buffers, headers = dict[int, Tensor](), dict[int, Header]()
    for number, each in enumerate(sorted(found, key=lambda each: each.header.rank)):
        if neighbours[number % len(neighbours)] == me and (buffer := each.read()) is not None:
            buffers[each.header.rank], headers[each.header.rank] = buffer, each.header
    told = ranks.all_gather(headers)
    servers: dict[int, list[int]] = defaultdict(list)
    for rank, of_rank in enumerate(told):
        for saved in of_rank:
            servers[saved].append(rank)
    sound = {saved: header for of_rank in told for saved, header in of_rank.items()}
    return Kept(headers=dict(sorted(sound.items())), servers=dict(servers), buffers=buffers, hosts=hosts)


def snapshot_in_memory(kept: Kept) -> Snapshot:
    """As the first rank had it, with what each has of the optimizer."""
    snapshots = [
        snapshot_of(
            decode(header.state, safetensors.torch.load(bytes.fromhex(header.tensors))), kept.step, header.config
        )
        for header in kept.headers.values()
    ]
    facts = {name: entry for snapshot in snapshots for name, entry in snapshot.facts.items()}
    return dataclasses.replace(snapshots[0], facts=facts)


def index_of(kept: Kept) -> Index:
    shards = {key: shard for header in kept.headers.values() for key, shard in header.shards.items()}
    return Index(tensors={key: (shard.shape, dtype_of(shard.dtype)) for key, shard in shards.items()}, first_keys={})


class SlotReader(StorageReader):
    """Reads for torch.distributed.checkpoint: what another rank has, it sends. All ranks of the group read at once."""

    def __init__(self, kept: Kept, ranks: HostRanks, device: torch.device) -> None:
        self._kept, self._ranks, self._device = kept, ranks, device
        self._chunks: dict[Chunk, int] = {}  # the saved rank that has it
        for saved, header in kept.headers.items():
            for key, shard in header.shards.items():
                self._chunks.setdefault((key, shard.offset), saved)
        self._dtypes = {key: dtype for key, (_, dtype) in index_of(kept).tensors.items()}
        self._views = {saved: views(buffer, kept.headers[saved].shards) for saved, buffer in kept.buffers.items()}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        whole: dict[str, tuple[str, tuple[int, ...]]] = {}
        for (key, offset), saved in self._chunks.items():
            shard = self._kept.headers[saved].shards[key]
            chunks[key].append(ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(shard.sizes)))
            whole[key] = shard.dtype, shard.shape
        return Metadata(
            state_dict_metadata={
                key: TensorStorageMetadata(
                    properties=TensorProperties(dtype=dtype_of(dtype)), size=torch.Size(shape), chunks=chunks[key]
                )
                for key, (dtype, shape) in whole.items()
            },
            storage_data={
                MetadataIndex(key, torch.Size(offset)): saved for (key, offset), saved in self._chunks.items()
            },
            storage_meta=StorageMeta(),
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wishes: dict[int, list[Wish]] = defaultdict(list)
        items: dict[int, list[Any]] = defaultdict(list)
        for item in plan.items:
            offset = tuple(item.storage_index.offset or ())
            key = item.storage_index.fqn
            server = self._server(self._chunks[key, offset])
            wishes[server].append((key, offset, tuple(item.storage_offsets), tuple(item.lengths)))
            items[server].append(item)
        for server, buffer in self._exchange(dict(wishes)):
            for item, part in zip(items[server], self._split(buffer, wishes[server]), strict=True):
                target = planner.resolve_tensor(item).detach()
                target.copy_(part)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _server(self, saved: int) -> int:
        """This rank, else one of its host, else any."""
        me, hosts = self._ranks.rank, self._kept.hosts
        return min(self._kept.servers[saved], key=lambda rank: (rank != me, hosts[rank] != hosts[me], rank))

    def _exchange(self, wishes: Mapping[int, list[Wish]]) -> Iterator[tuple[int, Tensor]]:
        """(server, its answer, uint8): to the next rank and from the one before, then two further, and so on."""
        me, ranks = self._ranks.rank, self._ranks.size
        of_ranks = self._ranks.all_gather(wishes)
        for distance in range(ranks):
            to, of = (me + distance) % ranks, (me - distance) % ranks
            answer = self._answer(of_ranks[to].get(me, []))
            if distance == 0:
                yield me, answer
                continue
            wanted = wishes.get(of, [])
            received = torch.empty(sum(map(self._bytes, wanted)), dtype=torch.uint8)
            self._swap(answer, to, received, of)
            if wanted:
                yield of, received

    def _swap(self, answer: Tensor, to: int, received: Tensor, of: int) -> None:
        """Over the group of training, whose links are the fastest, by way of the device."""
        group = self._ranks.parent
        for first in range(0, max(answer.numel(), received.numel()), PIECE):
            sent, coming = answer[first : first + PIECE], received[first : first + PIECE]
            buffer = torch.empty_like(coming, device=self._device)
            ops = []
            if sent.numel():
                ops.append(dist.P2POp(dist.isend, sent.to(self._device), group=group, group_peer=to))
            if coming.numel():
                ops.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=of))
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            coming.copy_(buffer)

    def _answer(self, wishes: Sequence[Wish]) -> Tensor:
        parts = []
        for key, offset, start, lengths in wishes:
            part = self._views[self._chunks[key, offset]][key]
            for dim, (first, length) in enumerate(zip(start, lengths, strict=True)):
                part = part.narrow(dim, first, length)
            parts.append(part.contiguous().reshape(-1).view(torch.uint8))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def _split(self, buffer: Tensor, wishes: Sequence[Wish]) -> Iterator[Tensor]:
        first = 0
        for wish in wishes:
            size = self._bytes(wish)
            # Cloned: a view of another dtype must begin at a multiple of its size.
            yield buffer[first : first + size].clone().view(self._dtypes[wish[0]]).reshape(wish[3])
            first += size

    def _bytes(self, wish: Wish) -> int:
        return math.prod(wish[3]) * self._dtypes[wish[0]].itemsize

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between two loads."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Everything is known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False
