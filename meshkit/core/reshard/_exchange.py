"""Resharding, the execution: bytes of a plan from shards of one layout into shards of another, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core.reshard._plan import ReallocationPlan, Transfer
from meshkit.core.reshard._region import Region, region_of, within
from meshkit.core.sharding import local_tensor
from meshkit.core.waiting import waiting


class Exchange:
    """One rank's part of a plan. Ranks of `group` that have a part call it together, each time.

    device: of the messages.
    """

    def __init__(self, plan: ReallocationPlan, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        rank = dist.get_rank()
        self._copies = [copy for copy in plan.copies if copy.sender == rank]
        # A round without this rank has no message for it: it is left out, and needs no barrier.
        own_rounds = ([t for t in round if rank in (t.sender, t.receiver)] for round in plan.rounds)
        self._rounds = [transfers for transfers in own_rounds if transfers]

    @torch.no_grad()
    def __call__(self, src: Shards, dst: Shards, mix: float = 1.0) -> None:
        """dst <- mix src + (1 - mix) dst."""
        rank = dist.get_rank()
        previous: _Round | None = None
        for transfers in self._rounds:
            # What a relay passes on may be still on its way to it.
            if previous is not None and any(each.relayed and each.sender == rank for each in transfers):
                previous.finish(dst, mix)
                previous = None
            # Packs while the messages of the previous round are on their way.
            current = _Round(transfers, src, dst, self._group, self._device)
            if previous is not None:
                previous.finish(dst, mix)
            previous = current
        # Copies within the rank overlap with the last round.
        for copy in self._copies:
            dst.write(copy, src.read(copy), mix)
        if previous is not None:
            previous.finish(dst, mix)


class Shards:
    """This rank's shards by name, addressed by regions of the full tensors.

    regions: of plain tensors that are parts of some; else a plain tensor is a full one.
    """

    def __init__(self, tensors: Mapping[str, Tensor], regions: Mapping[str, Region] | None = None) -> None:
        self.local = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        given = regions or {}
        self.regions = {name: given.get(name) or region_of(tensor) for name, tensor in tensors.items()}

    def read(self, transfer: Transfer) -> Tensor:
        # A view: `write` copies into it.
        return self.local[transfer.name][within(transfer.region, self.regions[transfer.name])]

    def write(self, transfer: Transfer, values: Tensor, mix: float) -> None:
        target = self.read(transfer)
        if mix == 1:
            target.copy_(values)
        else:
            # A bf16 destination would round the difference away before it is scaled.
            wide = torch.promote_types(target.dtype, values.dtype)
            target.copy_(torch.lerp(target.to(wide), values.to(wide), mix))


class _Round:
    """One round in flight: the messages that this rank sends and receives, one for each pair of ranks."""

    def __init__(
        self, transfers: Iterable[Transfer], src: Shards, dst: Shards, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        rank = dist.get_rank()
        by_link: dict[tuple[int, int], list[Transfer]] = {}
        # Wider dtypes first: each value then starts at a multiple of its item size, as a view with its dtype needs.
        for transfer in sorted(transfers, key=lambda transfer: -transfer.dtype.itemsize):
            by_link.setdefault((transfer.sender, transfer.receiver), []).append(transfer)
        self._arriving: list[tuple[Transfer, Tensor]] = []
        operations = []
        for (sender, receiver), of_link in by_link.items():
            # One buffer of bytes for tensors of several dtypes; the pieces are views of it.
            message = torch.empty(sum(transfer.bytes for transfer in of_link), dtype=torch.uint8, device=device)
            pieces = message.split([transfer.bytes for transfer in of_link])
            values = [
                piece.view(transfer.dtype).view([stop - start for start, stop in transfer.region])
                for transfer, piece in zip(of_link, pieces, strict=True)
            ]
            if sender == rank:
                for transfer, value in zip(of_link, values, strict=True):
                    value.copy_((dst if transfer.relayed else src).read(transfer))
                operations.append(dist.P2POp(dist.isend, message, receiver, group))
            else:
                self._arriving += zip(of_link, values, strict=True)
                operations.append(dist.P2POp(dist.irecv, message, sender, group))
        # Held until `finish`, for backends whose work does not keep the tensors of its messages alive.
        self._messages = [operation.tensor for operation in operations]
        # Batched, and one message for each pair of ranks: NCCL groups them, so that the order of sends and receives on two
        # ranks cannot make them wait for each other.
        self._works = dist.batch_isend_irecv(operations)

    def finish(self, dst: Shards, mix: float) -> None:
        with waiting("parts of the other layout"):
            for work in self._works:
                work.wait()
        for transfer, values in self._arriving:
            # A relay passes on what it has mixed: replicas have equal values before, so they have after.
            dst.write(transfer, values, 1.0 if transfer.relayed else mix)
        self._works, self._messages, self._arriving = [], [], []
