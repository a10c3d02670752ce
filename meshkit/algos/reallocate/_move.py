"""Executes a plan: bytes from the source's shards into the destination's, in place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.algos.reallocate._layout import Laid, Layout
from meshkit.algos.reallocate._plan import DEFAULT_BUCKET_BYTES, ReallocationPlan, Transfer, plan_reallocation
from meshkit.algos.reallocate._region import Region, volume, within
from meshkit.core.model_state import model_tensors
from meshkit.core.sharding import local_slices, local_tensor
from meshkit.core.waiting import waiting
from meshkit.errors import MeshError, PlanError
from meshkit.step import Run


def reallocate(
    src: Run | None,
    dst: Run | None,
    *,
    mix: float = 1.0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> ReallocationPlan:
    """dst <- src, on whatever meshes the two are, once. See `prepare_reallocation`, which is for moving again and again."""
    reallocation = prepare_reallocation(src, dst, mix=mix, bucket_bytes=bucket_bytes)
    reallocation()
    return reallocation.plan


def prepare_reallocation(
    src: Run | None,
    dst: Run | None,
    *,
    mix: float = 1.0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Reallocation:
    """Plan how the parameters and persistent buffers of `src` get into those of `dst`: call the result to move them.

    Two runs of one model on any two meshes, of the same ranks, other ranks, or some of both, with any axes, ZeRO stage and
    dtypes. None on a rank that is not of the run's mesh. Every rank of the world calls this; the result is called
    by the ranks of the two meshes, and does nothing on others.
    mix: dst <- mix src + (1 - mix) dst, computed in the wider dtype of the two; 1 is a copy.
    bucket_bytes: no rank sends and receives more at one time. A call holds two such buckets at most, and never a whole
    tensor that does not fit.
    Optimizer state stays: a destination is for inference, or gets its own optimizer.
    Wire: here one all-gather of which rank holds what; in each call the bytes of the plan, from rank to rank.
    Raises: on every rank, PlanError for two different models, naming the first tensor that differs, for a `mix` outside of
    (0, 1], and for arguments that differ between ranks; MeshError where a rank of a run's mesh does not bring the run.
    Source: Mei et al. 2024 (ReaL), section 4, for the idea; here layouts are boxes of indices, and any two fit.
    """
    own = _Part(_hold(src), _hold(dst), (mix, bucket_bytes), int(os.environ.get("LOCAL_WORLD_SIZE", "8")))
    parts: list[_Part] = [own] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    _refuse_arguments(parts)
    plan = plan_reallocation(
        _join("source", {rank: part.src for rank, part in enumerate(parts)}),
        _join("destination", {rank: part.dst for rank, part in enumerate(parts)}),
        exact=mix < 1,
        bucket_bytes=bucket_bytes,
        ranks_per_node=parts[0].ranks_per_node,
    )
    return Reallocation(src, dst, plan, mix)


class Reallocation:
    """Moves parameters from one run into another each time it is called, on every rank of the two. plan: what moves."""

    def __init__(self, src: Run | None, dst: Run | None, plan: ReallocationPlan, mix: float) -> None:
        self.src, self.dst, self.plan, self.mix = src, dst, plan, mix
        rank = dist.get_rank()
        self._copies = [copy for copy in plan.copies if copy.sender == rank]
        self._rounds = [
            own for own in ([t for t in round if rank in (t.sender, t.receiver)] for round in plan.rounds) if own
        ]

    @torch.no_grad()
    def __call__(self) -> None:
        """dst <- src. Between steps: parameters that are gathered for a forward are freed first."""
        src, dst = _Shards(self.src), _Shards(self.dst)
        under_way: _Round | None = None
        for transfers in self._rounds:
            started = _Round(transfers, src, dst)  # packs while the round before travels
            if under_way is not None:
                under_way.finish(dst, self.mix)
            under_way = started
        for copy in self._copies:
            dst.write(copy, src.read(copy), self.mix)
        if under_way is not None:
            under_way.finish(dst, self.mix)
        # What follows parameters, masters on the host for one, sees that they were written.
        torch.autograd.graph.increment_version(list(dst.tensors.values()))


class _Shards:
    """What this rank has of a run, addressed by places in whole tensors."""

    def __init__(self, run: Run | None) -> None:
        self.tensors = model_tensors(run.model) if run is not None else {}
        self.device = run.mesh.device if run is not None else None
        self.local = {name: local_tensor(tensor) for name, tensor in self.tensors.items()}
        self.held = {name: _region(tensor) for name, tensor in self.tensors.items()}

    def read(self, transfer: Transfer) -> Tensor:
        return self.local[transfer.name][within(transfer.region, self.held[transfer.name])]

    def write(self, transfer: Transfer, values: Tensor, mix: float) -> None:
        own = self.read(transfer)
        if mix == 1:
            own.copy_(values)
        else:
            wide = torch.promote_types(own.dtype, values.dtype)
            own.copy_(torch.lerp(own.to(wide), values.to(wide), mix))


class _Round:
    """The messages of one round that this rank sends and receives, on their way."""

    def __init__(self, transfers: Iterable[Transfer], src: _Shards, dst: _Shards) -> None:
        rank = dist.get_rank()
        device = src.device or dst.device
        by_link: dict[tuple[int, int], list[Transfer]] = {}
        # Wider dtypes first, so that each value lies where its dtype may lie.
        for transfer in sorted(transfers, key=lambda transfer: -transfer.dtype.itemsize):
            by_link.setdefault((transfer.sender, transfer.receiver), []).append(transfer)
        self._arriving: list[tuple[Transfer, Tensor]] = []
        operations = []
        for (sender, receiver), together in by_link.items():
            message = torch.empty(sum(transfer.bytes for transfer in together), dtype=torch.uint8, device=device)
            ends = message.split([transfer.bytes for transfer in together])
            values = [
                end.view(transfer.dtype).view([stop - start for start, stop in transfer.region])
                for transfer, end in zip(together, ends, strict=True)
            ]
            if sender == rank:
                for transfer, value in zip(together, values, strict=True):
                    value.copy_(src.read(transfer))
                operations.append(dist.P2POp(dist.isend, message, receiver))
            else:
                self._arriving += zip(together, values, strict=True)
                operations.append(dist.P2POp(dist.irecv, message, sender))
        self._messages = [operation.tensor for operation in operations]  # alive until they have come
        self._works = dist.batch_isend_irecv(operations)

    def finish(self, dst: _Shards, mix: float) -> None:
        with waiting("parts of the other layout"):
            for work in self._works:
                work.wait()
        for transfer, values in self._arriving:
            dst.write(transfer, values, mix)
        self._works, self._messages, self._arriving = [], [], []


@dataclass(frozen=True)
class _Held:
    """What a rank has of a run. ranks: the mesh's."""

    ranks: tuple[int, ...]
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, Region]]


@dataclass(frozen=True)
class _Part:
    """What a rank brings, and how it was asked."""

    src: _Held | None
    dst: _Held | None
    arguments: tuple[float, int]
    ranks_per_node: int


def _hold(run: Run | None) -> _Held | None:
    if run is None:
        return None
    tensors = model_tensors(run.model)
    return _Held(
        run.mesh.ranks,
        {name: (tuple(tensor.shape), local_tensor(tensor).dtype, _region(tensor)) for name, tensor in tensors.items()},
    )


def _region(tensor: Tensor) -> Region:
    return tuple((part.start, part.stop) for part in local_slices(tensor))


def _join(what: str, parts: dict[int, _Held | None]) -> Layout:
    """The layout of all ranks, of what each said of itself."""
    held = {rank: part for rank, part in parts.items() if part is not None}
    if not held:
        raise MeshError(
            f"reallocate: no rank gives the {what}. Pass the Run on the ranks of its mesh, and None elsewhere."
        )
    first, part = next(iter(held.items()))
    for rank in sorted({*held, *part.ranks}):
        if rank not in held or held[rank].ranks != part.ranks:
            gives = "gives none" if rank not in held else f"gives one on ranks {list(held[rank].ranks)}"
            raise MeshError(
                f"reallocate: rank {first} gives a {what} on ranks {list(part.ranks)}, and rank {rank} {gives}. Every rank "
                "of a run's mesh calls reallocate with that run."
            )
    regions: dict[str, dict[int, Region]] = {}
    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for rank, own in held.items():
        for name, (shape, dtype, region) in own.tensors.items():
            kinds[name] = shape, dtype
            regions.setdefault(name, {}).update({rank: region} if volume(region) else {})
    return Layout({name: Laid(*kind, regions[name]) for name, kind in kinds.items()}, part.ranks)


def _refuse_arguments(parts: Sequence[_Part]) -> None:
    mix, bucket_bytes = parts[0].arguments
    for rank, part in enumerate(parts):
        if part.arguments != parts[0].arguments:
            raise PlanError(
                f"reallocate: rank 0 asks for mix={mix} and bucket_bytes={bucket_bytes}, rank {rank} for "
                f"mix={part.arguments[0]} and bucket_bytes={part.arguments[1]}. Give the same on every rank."
            )
    if not 0 < mix <= 1:
        raise PlanError(f"reallocate: mix={mix} is the source's share. Use (0, 1]; 1 copies it.")
    if bucket_bytes < 64:
        raise PlanError(f"reallocate: bucket_bytes={bucket_bytes} holds next to nothing. Use some MiB.")
