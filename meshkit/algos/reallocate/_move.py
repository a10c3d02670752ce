"""Weight sync, the execution: bytes of a plan from the source's shards into the destination's, in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshkit.core import _torch
from meshkit.core.model_state import copies_of, model_tensors
from meshkit.core.reshard import (
    DEFAULT_BUCKET_BYTES,
    Exchange,
    Layout,
    ReallocationPlan,
    Region,
    Shards,
    TensorRegions,
    plan_reallocation,
    region_of,
    volume,
)
from meshkit.core.sharding import local_tensor
from meshkit.errors import MeshError, PlanError
from meshkit.mesh.world import ranks_per_node
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
    frozen: bool = True,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Reallocation:
    """Plan the weight sync of parameters and persistent buffers from `src` to `dst`; call the result to move them.

    src, dst: two runs of one model on any two meshes, of the same ranks, other ranks, or some of both, with any axes, ZeRO
    stage and dtypes; None on a rank outside of the run's mesh. Every rank of the world calls this. The ranks of the two
    meshes call the result; on others it does nothing.
    mix: dst <- mix src + (1 - mix) dst, computed in the wider dtype of the two; 1 is a copy.
    frozen: whether parameters that do not train move too; where the two have the same ones, as under adapters, they need not.
    bucket_bytes: the most that a rank sends and receives at one time. A call holds at most two such buckets, and never all of
    a tensor that does not fit.
    Optimizer state is not moved: a destination is for inference, or gets its own optimizer.
    Wire: here one all-gather of what each rank holds; in each call the bytes of the plan, from rank to rank.
    Raises: on every rank, PlanError for two different models, naming the first tensor that differs, for a `mix` outside of
    (0, 1], and for arguments that differ between ranks; MeshError where a rank of a run's mesh does not bring the run.
    Source: Mei et al. 2024 (ReaL), section 4, for the idea; here layouts are boxes of indices, and any two fit.
    """
    request = _Request(
        _shards_of(src, frozen),
        _shards_of(dst, frozen),
        (mix, bucket_bytes, frozen),
        ranks_per_node(),
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
        device = next((run.mesh.device for run in (src, dst) if run is not None), torch.device("cpu"))
        self._exchange = Exchange(plan, _torch.world(), device)

    @torch.no_grad()
    def __call__(self) -> None:
        """dst <- src. Call it between steps: parameters that are still gathered for a forward are resharded first."""
        tensors = [model_tensors(run.model) if run is not None else {} for run in (self.src, self.dst)]
        self._exchange(Shards(tensors[0]), Shards(tensors[1]), self.mix)
        # Copies into detached shards leave the versions of parameters as they are, and an optimizer with masters on the host
        # sees by the version that a parameter was written, and its master is old.
        torch.autograd.graph.increment_version(list(tensors[1].values()))


@dataclass(frozen=True)
class _RankShards:
    """The regions that a rank holds of a run, by tensor. ranks: the mesh's."""

    ranks: tuple[int, ...]
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, Region]]


@dataclass(frozen=True)
class _Request:
    """The call of one rank: its shards and its arguments (mix, bucket_bytes, frozen)."""

    src: _RankShards | None
    dst: _RankShards | None
    arguments: tuple[float, int, bool]
    ranks_per_node: int


def _shards_of(run: Run | None, frozen: bool) -> _RankShards | None:
    if run is None:
        return None
    tensors, copies = model_tensors(run.model), copies_of(run.model)
    for name, param in run.model.named_parameters():
        if not (frozen or param.requires_grad):
            tensors.pop(copies.get(name, name), None)
    return _RankShards(
        run.mesh.ranks,
        {
            name: (tuple(tensor.shape), local_tensor(tensor).dtype, region_of(tensor))
            for name, tensor in tensors.items()
        },
    )


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
    mix, bucket_bytes, _ = requests[0].arguments
    for rank, request in enumerate(requests):
        if request.arguments != requests[0].arguments:
            raise PlanError(
                f"reallocate: rank 0 asks for {_said(requests[0])}, rank {rank} for {_said(request)}. Give the same on every "
                "rank."
            )
    if not 0 < mix <= 1:
        raise PlanError(f"reallocate: mix={mix} is the source's share. Use (0, 1]; 1 copies it.")
    if bucket_bytes < 64:
        raise PlanError(f"reallocate: bucket_bytes={bucket_bytes} holds next to nothing. Use some MiB.")


def _said(request: _Request) -> str:
    mix, bucket_bytes, frozen = request.arguments
    return f"mix={mix}, bucket_bytes={bucket_bytes} and frozen={frozen}"
