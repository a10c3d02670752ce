"""Keeping a checkpoint in memory: this rank's state into its slot, and copies of it into slots of other hosts (peer memory).

Source: Wang et al. 2023 (Gemini): copies on other hosts, in other failure domains, sent beside training; hosts in blocks that
keep each other's.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.checkpoint._agree import gather_results, on_rank_0
from meshkit.checkpoint._dcp import Part
from meshkit.checkpoint._save import HostCopies, collect
from meshkit.checkpoint._snapshot import Snapshot
from meshkit.checkpoint.in_memory._restore import Kept, newest
from meshkit.checkpoint.in_memory._slots import (
    SLOTS,
    Header,
    Shard,
    Slot,
    find,
    host_name,
    lay_out,
    remove,
    remove_if_empty,
    views,
)
from meshkit.core import _torch
from meshkit.core.optimizer_state import HoldsState
from meshkit.core.word_sum import word_sum
from meshkit.errors import CheckpointError
from meshkit.mesh import HostRanks, Mesh
from meshkit.step import Run

ORIGIN = ".in-memory.json"  # in the folder of checkpoints: whose slots are meant


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """Where in-memory checkpoints are, and on how many other hosts.

    copies: of each rank's state on other hosts; at most one on each, so none on a single host, whose memory outlives its
    processes. folder: on a RAM disk of each host; `docker run --shm-size` says how large /dev/shm is in a container.
    Memory of the hosts: two slots of each rank's share of parameters and optimizer state, and two of each copy.
    """

    copies: int = 1
    folder: str | os.PathLike[str] = "/dev/shm"

    def __post_init__(self) -> None:
        if self.copies < 0:
            raise CheckpointError(f"InMemory(copies={self.copies}): keep 0 or more copies on other hosts.")

    def bytes_of(self, run: Run, optimizer: HoldsState | None) -> int:
        """Of host memory for this rank, once the optimizer has its state: its slots, and as many as it keeps for others."""
        _, parts = collect(run, optimizer, step=0, scheduler=None, loader=None, config=None, extra=None)
        return SLOTS * (1 + self.copies) * lay_out(parts)[1]


def partners(hosts: Sequence[str], copies: int) -> list[list[int]]:
    """For each copy, the rank that keeps that of each rank: on the next host of its block, on the one after that, and so on.

    hosts: of each rank. A block is `copies + 1` hosts, the last one with what is left besides: so the fewest sets of hosts
    can take all copies of a rank with them (Gemini, section 4), and ranks talk with few. The ranks of a host give theirs to
    those of another in turn.
    """
    names = [*dict.fromkeys(hosts)]
    ranks = {name: [rank for rank, host in enumerate(hosts) if host == name] for name in names}
    width, whole = copies + 1, max(1, len(names) // (copies + 1))
    blocks = [names[index * width : (index + 1) * width if index < whole - 1 else None] for index in range(whole)]
    block_of = {name: block for block in blocks for name in block}
    rounds = []
    for copy in range(1, min(copies, len(names) - 1) + 1):
        row = []
        for rank, host in enumerate(hosts):
            block = block_of[host]
            others = ranks[block[(block.index(host) + copy) % len(block)]]
            row.append(others[ranks[host].index(rank) % len(others)])
        rounds.append(row)
    return rounds


def circles(rounds: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks that keep each other's copies, and those of whom they keep them."""
    circle = {rank: {rank} for rank in range(len(rounds[0]) if rounds else 0)}
    for row in rounds:
        for rank, keeper in enumerate(row):
            if circle[rank] is not circle[keeper]:
                joined = circle[rank] | circle[keeper]
                circle |= dict.fromkeys(joined, joined)
    return sorted({min(each): sorted(each) for each in circle.values()}.values())


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """What one save writes: this rank's slot with its shards, and those of the ranks whose copies it keeps."""

    own: Slot
    shards: dict[str, Shard]
    views: dict[str, Tensor]
    copies: dict[int, Slot]


class Keeper:
    """The slots of one rank. checkpoints: the folder on disk, which names the job: slots of another are not this one's."""

    def __init__(self, policy: InMemory, checkpoints: Path) -> None:
        self._policy, self._checkpoints = policy, checkpoints
        name = f"{checkpoints.resolve()} {socket.gethostname()}"
        name = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        self.folder = Path(policy.folder) / f"meshkit-{os.getuid()}-{name}"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="in-memory")
        self._pending: Future[None] | None = None
        self._staging = HostCopies()
        self._ranks: HostRanks | None = None
        self._origin, self._life, self._saves = "", "", 0
        self._slots: list[_Slots | None] = [None] * SLOTS
        self._rounds: list[list[int]] = []  # see `partners`
        self._circle: dist.ProcessGroup | None = None  # see `circles`; None on a single host

    def _read_origin(self) -> str | None:
        """Of the folder of checkpoints; None where it has none, so that no slot belongs to it."""
        try:
            origin = json.loads((self._checkpoints / ORIGIN).read_text())["origin"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return origin if isinstance(origin, str) else None

    def newest(self, ranks: HostRanks) -> Kept | None:
        """See `_restore.newest`. Collective."""
        origin = on_rank_0(ranks, "resume()", self._read_origin)
        return None if origin is None else newest(self.folder, origin, ranks)

    def begin(self, ranks: HostRanks, *, loaded: Kept | None = None) -> None:
        """A new life, after this was loaded; without it no slot that there is belongs to the folder any more.

        Collective; what nobody will load any more goes.
        """
        self.wait()
        origin = None if loaded is None else loaded.origin
        told = on_rank_0(ranks, "save_in_memory()", lambda: (origin or self._new_origin(), uuid.uuid4().hex[:16]))
        self._origin, self._life = told
        self._saves, self._slots = 0, [None] * SLOTS
        there = [] if loaded is None else find(self.folder, self._origin)
        kept = {each.path.stem for each in there if loaded is not None and each.header.group == loaded.group}
        remove(self.folder, keeping=lambda name, life: name in kept)

    def _new_origin(self) -> str:
        origin = uuid.uuid4().hex
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        partial = self._checkpoints / f"{ORIGIN}.partial"
        partial.write_text(json.dumps({"origin": origin}))
        os.replace(partial, self._checkpoints / ORIGIN)
        return origin

    # ------------------------------------------------------------------------------------------------------------ saving

    def has_room(self, parts: Mapping[str, Part]) -> bool:
        """Whether the slot of the next save is laid out for these, on this rank."""
        slots = self._slots[self._saves % SLOTS]
        return slots is not None and slots.shards == lay_out(parts)[0]

    def make_room(self, parts: Mapping[str, Part], mesh: Mesh, timeout: timedelta) -> None:
        """Lay out the slot of the next save, here and where its copies go. Collective.

        Raises: CheckpointError, on every rank the same, where a host has not enough memory.
        """
        # Its own: the thread that writes to disk uses the other one.
        ranks = self._ranks = self._ranks or mesh.host
        if not self._life:
            self.begin(ranks)
        if self._saves:  # there is something newer than what was loaded, whole on every rank
            remove(self.folder, keeping=lambda name, life: life == self._life)
        rank, number = ranks.rank, self._saves % SLOTS
        shards, size = lay_out(parts)
        told = gather_results(ranks, "save_in_memory()", lambda: (host_name(), size))
        rounds = partners([host for host, _ in told], self._policy.copies)
        if rounds != self._rounds:
            self._rounds = rounds
            groups = [[mesh.ranks[each] for each in circle] for circle in circles(rounds)]
            (self._circle,) = _torch.split(mesh.group, [groups], backend="gloo", timeout=timeout)
        kept = [sender for row in self._rounds for sender, keeper in enumerate(row) if keeper == rank]

        def reserve() -> _Slots:
            own, *copies = (Slot(self.folder, each, self._life, number) for each in (rank, *kept))
            for slot, each in zip((own, *copies), (rank, *kept), strict=True):
                slot.reserve(told[each][1])
            return _Slots(
                own=own, shards=shards, views=views(own.buffer, shards), copies=dict(zip(kept, copies, strict=True))
            )

        made: list[_Slots] = []
        gather_results(ranks, "save_in_memory()", lambda: made.append(reserve()))
        self._slots[number] = made[0]

    def save(self, snapshot: Snapshot, parts: Mapping[str, Part], mesh: dict[str, int]) -> None:
        """Copy the parts, and have the thread do the rest: the sum, the header, the other hosts.

        Every rank has waited for its last save, and knows that all others have: the slot of the one before may go.
        """
        slots = self._slots[self._saves % SLOTS]
        assert slots is not None and slots.shards.keys() == parts.keys()
        self._saves += 1
        for slot in (slots.own, *slots.copies.values()):
            slot.clear()
        staged: Mapping[str, Part] = {}
        if all(part.tensor.device.type == "cpu" for part in parts.values()):
            self._copy(slots, parts)
        else:  # through pinned memory, while the device goes on
            staged = self._staging.copy(parts)
        self._pending = self._thread.submit(self._finish, snapshot, slots, staged, mesh)

    @staticmethod
    @torch.no_grad()
    def _copy(slots: _Slots, parts: Mapping[str, Part]) -> None:
        for key, part in parts.items():
            slots.views[key].copy_(part.tensor)

    def _finish(
        self,
        snapshot: Snapshot,
        slots: _Slots,
        staged: Mapping[str, Part],
        mesh: dict[str, int],
    ) -> None:
        assert self._ranks is not None
        if staged:
            self._copy(slots, staged)
        state, tensors = snapshot.encode()
        header = Header(
            origin=self._origin,
            life=self._life,
            step=snapshot.step,
            rank=self._ranks.rank,
            ranks=self._ranks.size,
            mesh=mesh,
            shards=slots.shards,
            state=state,
            tensors=safetensors.torch.save(tensors).hex(),
            config=snapshot.config,
            nbytes=slots.own.buffer.numel(),
            sum=int(word_sum(slots.own.buffer)),
        ).encode()
        slots.own.complete(header)
        for row in self._rounds:
            self._send(header, slots, row, self._ranks.rank)

    def _send(self, header: bytes, slots: _Slots, row: Sequence[int], me: int) -> None:
        """One copy of each rank to the rank that keeps it."""
        group = self._circle
        assert group is not None
        circle = next(each for each in circles(self._rounds) if me in each)
        place = {rank: index for index, rank in enumerate(circle)}
        senders = [sender for sender, keeper in enumerate(row) if keeper == me]
        text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        sizes = {sender: torch.zeros(1, dtype=torch.int64) for sender in senders}
        works = [dist.isend(torch.tensor([text.numel()]), group=group, group_dst=place[row[me]])]
        works += [dist.irecv(size, group=group, group_src=place[sender]) for sender, size in sizes.items()]
        _wait(works)
        headers = {sender: torch.empty(int(size), dtype=torch.uint8) for sender, size in sizes.items()}
        works = [dist.isend(each, group=group, group_dst=place[row[me]]) for each in (text, slots.own.buffer)]
        for sender in senders:
            for each in (headers[sender], slots.copies[sender].buffer):
                works.append(dist.irecv(each, group=group, group_src=place[sender]))
        _wait(works)
        for sender, received in headers.items():
            slots.copies[sender].complete(received.numpy().tobytes())

    def wait(self) -> None:
        """Return when the last save is whole, here and where its copies are.

        Raises: CheckpointError if it failed, as where another rank is gone; what was whole before is so still.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except Exception as error:
            raise CheckpointError(f"save_in_memory(): {type(error).__name__}: {error}") from error

    def close(self, *, discard: bool) -> None:
        """discard: the job needs them no more; else they stay for the next start."""
        try:
            self.wait()
        finally:
            if self._life and discard:
                self._discard()
            self._thread.shutdown(wait=discard)
            circle, self._circle, self._rounds = self._circle, None, []
            if circle is not None and discard and dist.is_initialized():
                dist.destroy_process_group(circle)

    def _discard(self) -> None:
        remove(self.folder, keeping=lambda name, life: life == self._life)
        for slots in self._slots:
            if slots is not None:  # others of this host may be writing theirs still
                for slot in (slots.own, *slots.copies.values()):
                    slot.remove()
        remove_if_empty(self.folder)


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None  # this rank is in the group
        work.wait()
