"""Whole matrices of tensors that are split over ranks: each comes to one rank, which computes with it, and goes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core import _torch
from meshkit.core.reshard import (
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
from meshkit.core.sharding import even_part, local_tensor
from meshkit.errors import PlanError
from meshkit.mesh import Mesh
from meshkit.mesh.world import ranks_per_node

Held = dict[str, tuple[tuple[int, ...], torch.dtype, Region]]
Function = Callable[[Tensor], Tensor]


class WholeMatrices:
    """The matrices of a run, each of which is whole on one rank while a function computes with it.

        whole = WholeMatrices(run.mesh, {name: param for name, param in run.named_parameters() if param.ndim == 2})
        whole.apply(gradients, function)

    mesh: of the run. tensors: by a name that is the same on every rank, [rows, columns], or [experts, rows, columns], which
    are matrices side by side; a rank names those that it has some of. dtype: in which they are computed with, and travel
    where it is the narrower one; default, their own.
    A matrix goes to one of the ranks that hold some of it, replicas too, so that all have about equally much to do: rows ·
    columns · the smaller of both.
    Memory: on each rank, for the time of `apply`, those that it computes with.
    Wire: in the first call a gather over the mesh of what each rank holds, as objects; in each call, from rank to rank, the
    bytes of the two `plans`, and between them a meeting of `Mesh.agreement`.
    Raises: PlanError for a tensor that is no matrix.
    """

    def __init__(self, mesh: Mesh, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> None:
        self._mesh, self._dtype = mesh, dtype
        for name, tensor in tensors.items():
            if tensor.ndim not in (2, 3):
                raise PlanError(
                    f"WholeMatrices: {name!r} has the shape {list(tensor.shape)}. Give matrices: [rows, columns], or "
                    "[experts, rows, columns]."
                )
        self._held: Held = {
            name: (tuple(tensor.shape), local_tensor(tensor).dtype, region_of(tensor))
            for name, tensor in tensors.items()
        }

    @torch.no_grad()
    def apply(self, values: Mapping[str, Tensor], function: Function | Mapping[str, Function]) -> None:
        """Let each of the values be function(it), in place. Every rank of the mesh must call it.

        values: of every name, laid out as the tensors. function: of [rows, columns] or, of experts, [some, rows, columns],
        which returns as much; or one for each name.
        Raises: PlanError for other values than were named, or laid out otherwise, and for a result of another shape;
        AgreementError on all ranks where only some have these, or a function that raises. What the values then are is not
        said.
        """
        of = function if isinstance(function, Mapping) else dict.fromkeys(self._held, function)
        if _torch.is_fake_group(self._mesh.group):
            return self._apply_to_about_as_much(of)
        rank, (_, owners) = self._mesh.ranks[self._mesh.rank], self._layouts
        regions = {name: each.regions[rank] for name, each in owners.tensors.items() if rank in each.regions}
        wholes = {
            name: torch.empty(_sizes(region), dtype=owners.tensors[name].dtype, device=self._mesh.device)
            for name, region in regions.items()
        }
        there, back = self._exchanges
        shards, misfit = self._shards(values)
        error: Exception | None = misfit
        owned = Shards(wholes, regions)
        there(shards, owned)
        # A rank that has failed goes along, so that none waits for it, and says so where all meet.
        try:
            for name, whole in wholes.items():
                _replace(whole, of[name], name)
        except Exception as raised:
            error = error or raised
        self._mesh.agreement.meet("WholeMatrices.apply", facts={"error": _in_a_line(error)})
        back(owned, shards)
        if error is not None:
            raise error

    def _shards(self, values: Mapping[str, Tensor]) -> tuple[Shards, PlanError | None]:
        """(the values, zeros where they do not fit, the first that does not)."""
        fitting: dict[str, Tensor] = {}
        for name, (shape, _, region) in self._held.items():
            value = values.get(name)
            if value is not None and tuple(value.shape) == shape and region_of(value) == region:
                fitting[name] = value
        error = None
        for name in (*self._held, *values):
            if name not in fitting:
                what = "laid out otherwise" if name in values else "missing"
                what = what if name in self._held else "none that was named to this WholeMatrices"
                error = PlanError(
                    f"WholeMatrices.apply: the value of {name!r} is {what}. Give one of each, as they were."
                )
                break
        zeros = {
            name: torch.zeros(_sizes(region), dtype=dtype, device=self._mesh.device)
            for name, (_, dtype, region) in self._held.items()
            if name not in fitting
        }
        return Shards(fitting | zeros, {name: region for name, (_, _, region) in self._held.items()}), error

    def _apply_to_about_as_much(self, of: Mapping[str, Function]) -> None:
        """In a fake world, where no rank tells another what it holds: as much memory, and nothing is sent."""
        share, wholes = 0.0, list[tuple[str, Tensor]]()
        for name, (shape, dtype, region) in self._held.items():
            matrices = torch.Size(shape[:-2]).numel()
            share += matrices * volume(region) / torch.Size(shape).numel()
            own = min(matrices, round(share))
            share -= own
            if own:
                sizes = shape if len(shape) == 2 else (own, *shape[1:])
                wholes.append((name, torch.empty(sizes, dtype=self._dtype or dtype, device=self._mesh.device)))
        for name, whole in wholes:
            _replace(whole, of[name], name)

    @cached_property
    def plans(self) -> tuple[ReallocationPlan, ReallocationPlan]:
        """What is sent to the ranks that compute, and back. Every rank must ask, or call `apply`. Print them."""
        held, owners = self._layouts
        return (
            plan_reallocation(held, owners, ranks_per_node=ranks_per_node()),
            plan_reallocation(owners, held, ranks_per_node=ranks_per_node()),
        )

    @cached_property
    def _exchanges(self) -> tuple[Exchange, Exchange]:
        there, back = (Exchange(plan, self._mesh.group, self._mesh.device) for plan in self.plans)
        return there, back

    @cached_property
    def _layouts(self) -> tuple[Layout, Layout]:
        """Where the tensors lie, and where they are computed with."""
        told: list[Any] = [self._held]
        if self._mesh.spec.world_size > 1:
            told = [None] * self._mesh.spec.world_size
            dist.all_gather_object(told, self._held, group=self._mesh.group)
        tensors: dict[str, TensorRegions] = {}
        for rank, of_rank in zip(self._mesh.ranks, told, strict=True):
            for name, (shape, dtype, region) in of_rank.items():
                regions = {**tensors[name].regions} if name in tensors else {}
                regions |= {rank: region} if volume(region) else {}
                tensors[name] = TensorRegions(shape, dtype, regions)
        return Layout(tensors, self._mesh.ranks), Layout(_shared_out(tensors, self._dtype), self._mesh.ranks)


def _shared_out(tensors: Mapping[str, TensorRegions], dtype: torch.dtype | None) -> dict[str, TensorRegions]:
    """The same on every rank. The dearest first, to the rank with least to do so far; experts are shared out evenly."""
    work: Counter[int] = Counter()
    found: dict[str, TensorRegions] = {}
    for name in sorted(tensors, key=lambda name: (-_work(tensors[name].shape), name)):
        tensor = tensors[name]
        whole, ranks = tuple((0, size) for size in tensor.shape), sorted(tensor.regions)
        if len(tensor.shape) == 2:
            regions = {min(ranks, key=lambda rank: (work[rank], rank)): whole}
        else:
            parts = [even_part(tensor.shape[0], len(ranks), index) for index in range(len(ranks))]
            regions = {
                rank: ((part.start, part.stop), *whole[1:]) for rank, part in zip(ranks, parts, strict=True) if part
            }
        for rank, region in regions.items():
            work[rank] += _work(_sizes(region))
        found[name] = TensorRegions(tensor.shape, dtype or tensor.dtype, regions)
    return {name: found[name] for name in tensors}


def _replace(whole: Tensor, function: Function, name: str) -> None:
    result: Any = function(whole)
    if not isinstance(result, Tensor) or result.shape != whole.shape:
        got = f"the shape {list(result.shape)}" if isinstance(result, Tensor) else f"the type {type(result).__name__}"
        raise PlanError(
            f"WholeMatrices.apply: what comes for {name!r} of shape {list(whole.shape)} has {got}. Return as much."
        )
    whole.copy_(result)


def _in_a_line(error: Exception | None) -> str:
    return "none" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _sizes(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def _work(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * min(shape[-2:])
