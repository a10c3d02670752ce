"""Weight sync, the execution: bytes of a plan from the source's shards into the destination's, in place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.algos.reallocate._layout import Layout, TensorRegions
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
    """dst <- src, once, from any mesh to any other. To move repeatedly, see `prepare_reallocation`."""
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
    """Plan the weight sync of parameters and persistent buffers from `src` to `dst`; call the result to move them.

    src, dst: two runs of one model on any two meshes, of the same ranks, other ranks, or some of both, with any axes, ZeRO
    stage and dtypes; None on a rank outside of the run's mesh. Every rank of the world calls this. The ranks of the two
    meshes call the result; on others it does nothing.
    mix: dst <- mix src + (1 - mix) dst, computed in the wider dtype of the two; 1 is a copy.
    bucket_bytes: the most that a rank sends and receives at one time. A call holds at most two such buckets, and never all of
    a tensor that does not fit.
    Optimizer state is not moved: a destination is for inference, or gets its own optimizer.
    Wire: here one all-gather of what each rank holds; in each call the bytes of the plan, from rank to rank.
    Raises: on every rank, PlanError for two different models, naming the first tensor that differs, for a `mix` outside of
    (0, 1], and for arguments that differ between ranks; MeshError where a rank of a run's mesh does not bring the run.
    Source: Mei et al. 2024 (ReaL), section 4, for the idea; here layouts are boxes of indices, and any two fit.
    """
    request = _Request(
        _shards_of(src), _shards_of(dst), (mix, bucket_bytes), int(os.environ.get("LOCAL_WORLD_SIZE", "8"))
    )
    # See [Note: gather the error, then raise] in rewards/_score.py: every rank sees all requests, and refuses alike.
    requests: list[_Request] = [request] * dist.get_world_size()
    dist.all_gather_object(requests, request)
    _refuse_arguments(requests)
    plan = plan_reallocation(
        _join("source", {rank: each.src for rank, each in enumerate(requests)}),
        _join("destination", {rank: each.dst for rank, each in enumerate(requests)}),
        exact=mix < 1,
        bucket_bytes=bucket_bytes,
        ranks_per_node=requests[0].ranks_per_node,
    )
    return Reallocation(src, dst, plan, mix)


class Reallocation:
    """Moves parameters from one run into another each time it is called, on every rank of the two. plan: what moves."""

    def __init__(self, src: Run | None, dst: Run | None, plan: ReallocationPlan, mix: float) -> None:
        self.src, self.dst, self.plan, self.mix = src, dst, plan, mix
        rank = dist.get_rank()
        self._copies = [copy for copy in plan.copies if copy.sender == rank]
        # A round without this rank has no message for it: it is left out, and needs no barrier.
        own_rounds = ([t for t in round if rank in (t.sender, t.receiver)] for round in plan.rounds)
        self._rounds = [transfers for transfers in own_rounds if transfers]

    @torch.no_grad()
    def __call__(self) -> None:
        """dst <- src. Call it between steps: parameters that are still gathered for a forward are resharded first."""
        src, dst = _Shards(self.src), _Shards(self.dst)
        previous: _Round | None = None
        for transfers in self._rounds:
            current = _Round(transfers, src, dst)  # packs while the messages of the previous round are on their way
            if previous is not None:
                previous.finish(dst, self.mix)
            previous = current
        # Copies within the rank overlap with the last round.
        for copy in self._copies:
            dst.write(copy, src.read(copy), self.mix)
        if previous is not None:
            previous.finish(dst, self.mix)
        # Copies into detached shards leave the versions of parameters as they are, and an optimizer with masters on the host
        # sees by the version that a parameter was written, and its master is old.
        torch.autograd.graph.increment_version(list(dst.tensors.values()))


class _Shards:
    """This rank's shards of a run, addressed by regions of the full tensors."""

    def __init__(self, run: Run | None) -> None:
        self.tensors = model_tensors(run.model) if run is not None else {}
        self.device = run.mesh.device if run is not None else None
        self.local = {name: local_tensor(tensor) for name, tensor in self.tensors.items()}
        self.regions = {name: _region(tensor) for name, tensor in self.tensors.items()}

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

    def __init__(self, transfers: Iterable[Transfer], src: _Shards, dst: _Shards) -> None:
        rank = dist.get_rank()
        device = src.device or dst.device
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
                    value.copy_(src.read(transfer))
                operations.append(dist.P2POp(dist.isend, message, receiver))
            else:
                self._arriving += zip(of_link, values, strict=True)
                operations.append(dist.P2POp(dist.irecv, message, sender))
        # Held until `finish`, for backends whose work does not keep the tensors of its messages alive.
        self._messages = [operation.tensor for operation in operations]
        # Batched, and one message for each pair of ranks: NCCL groups them, so that the order of sends and receives on two
        # ranks cannot make them wait for each other.
        self._works = dist.batch_isend_irecv(operations)

    def finish(self, dst: _Shards, mix: float) -> None:
        with waiting("parts of the other layout"):
            for work in self._works:
                work.wait()
        for transfer, values in self._arriving:
            dst.write(transfer, values, mix)
        self._works, self._messages, self._arriving = [], [], []


@dataclass(frozen=True)
class _RankShards:
    """The regions that a rank holds of a run, by tensor. ranks: the mesh's."""

    ranks: tuple[int, ...]
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, Region]]


@dataclass(frozen=True)
class _Request:
    """The call of one rank: its shards and its arguments (mix, bucket_bytes)."""

    src: _RankShards | None
    dst: _RankShards | None
    arguments: tuple[float, int]
    ranks_per_node: int


def _shards_of(run: Run | None) -> _RankShards | None:
    if run is None:
        return None
    tensors = model_tensors(run.model)
    return _RankShards(
        run.mesh.ranks,
        {name: (tuple(tensor.shape), local_tensor(tensor).dtype, _region(tensor)) for name, tensor in tensors.items()},
    )


def _region(tensor: Tensor) -> Region:
    return tuple((part.start, part.stop) for part in local_slices(tensor))


def _join(what: str, by_rank: dict[int, _RankShards | None]) -> Layout:
    """The layout of the run, from the shards of its ranks."""
    shards = {rank: of_rank for rank, of_rank in by_rank.items() if of_rank is not None}
    if not shards:
        raise MeshError(
            f"reallocate: no rank gives the {what}. Pass the Run on the ranks of its mesh, and None elsewhere."
        )
    first, of_first = next(iter(shards.items()))
    for rank in sorted({*shards, *of_first.ranks}):
        if rank not in shards or shards[rank].ranks != of_first.ranks:
            gives = "gives none" if rank not in shards else f"gives one on ranks {list(shards[rank].ranks)}"
            raise MeshError(
                f"reallocate: rank {first} gives a {what} on ranks {list(of_first.ranks)}, and rank {rank} {gives}. Every "
                "rank of a run's mesh calls reallocate with that run."
            )
    regions: dict[str, dict[int, Region]] = {}
    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for rank, of_rank in shards.items():
        for name, (shape, dtype, region) in of_rank.tensors.items():
            kinds[name] = shape, dtype
            regions.setdefault(name, {}).update({rank: region} if volume(region) else {})
    return Layout({name: TensorRegions(*kind, regions[name]) for name, kind in kinds.items()}, of_first.ranks)


def _refuse_arguments(requests: Sequence[_Request]) -> None:
    mix, bucket_bytes = requests[0].arguments
    for rank, request in enumerate(requests):
        if request.arguments != requests[0].arguments:
            raise PlanError(
                f"reallocate: rank 0 asks for mix={mix} and bucket_bytes={bucket_bytes}, rank {rank} for "
                f"mix={request.arguments[0]} and bucket_bytes={request.arguments[1]}. Give the same on every rank."
            )
    if not 0 < mix <= 1:
        raise PlanError(f"reallocate: mix={mix} is the source's share. Use (0, 1]; 1 copies it.")
    if bucket_bytes < 64:
        raise PlanError(f"reallocate: bucket_bytes={bucket_bytes} holds next to nothing. Use some MiB.")
