"""Which rank holds which part of each tensor of a model, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from meshkit.algos.reallocate._region import Region, volume
from meshkit.core.sharding import chunk
from meshkit.mesh import DENSE_AXES, MeshSpec
from meshkit.parallel.expert import ExpertLayout, expert_layouts, in_expert_view
from meshkit.parallel.pipeline import Generator, Schedule, plan_pipeline
from meshkit.parallel.tensor.layout import TensorLayout, tensor_layout
from meshkit.plan import Plan, match_names


@dataclass(frozen=True)
class Laid:
    """One tensor. regions: the part of each rank of the world that holds some of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: Mapping[int, Region]


@dataclass(frozen=True)
class Layout:
    """Parameters and persistent buffers by single-device name, a tied one once. ranks: of the world, that hold the model."""

    tensors: Mapping[str, Laid]
    ranks: tuple[int, ...]

    def bytes_of(self, rank: int) -> int:
        """What the rank holds."""
        return sum(
            volume(laid.regions[rank]) * laid.dtype.itemsize for laid in self.tensors.values() if rank in laid.regions
        )


def layout_of(
    model: nn.Module,
    spec: MeshSpec | str,
    *,
    plan: Plan,
    ranks: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    schedule: Generator | Schedule | str = "1f1b",
    stages: Sequence[int] | None = None,
) -> Layout:
    """What `parallelize(model, init_mesh(spec, ranks=ranks), plan=...)` will lay where. Needs no ranks, and no values.

    model: whole, as `parallelize` gets it; on meta is enough. ranks: of the world, default 0, 1, ...
    dtype: of floating parameters, None keeps the model's. schedule, stages: with pp, as given to `parallelize`.
    Raises: MeshError or PlanError as `init_mesh` and `parallelize` do.
    """
    spec = MeshSpec.parse(spec) if isinstance(spec, str) else spec
    spec = spec.resolve(spec.world_size if ranks is None else len(ranks), part=ranks is not None)
    on = tuple(range(spec.world_size) if ranks is None else ranks)
    blocks = match_names(plan.blocks, dict(model.named_modules()), what="module")
    cut = plan_pipeline(model, spec.pp, blocks=blocks, schedule=schedule, split=stages) if spec.pp > 1 else None
    split = tensor_layout(model, plan.tensor, size=spec.tp, sequence=False) if spec.tp > 1 else None
    experts = expert_layouts(model, plan.tensor, ep=spec.ep, etp=spec.etp) if in_expert_view(spec) else {}
    tensors = {}
    for names, tensor in _tensors(model):
        regions = {}
        for place, rank in enumerate(on):
            if cut is None or any(cut.runs(name, _at(spec, place)["pp"]) for name in names):
                whole: Region = tuple((0, size) for size in tensor.shape)
                trained = isinstance(tensor, nn.Parameter)  # buffers are whole on every rank
                regions[rank] = _part(names[0], whole, spec, place, split, experts) if trained else whole
        kept = {rank: region for rank, region in regions.items() if volume(region)}
        floating = dtype if dtype is not None and isinstance(tensor, nn.Parameter) else tensor.dtype
        tensors[names[0]] = Laid(tuple(tensor.shape), floating, kept)
    return Layout(tensors, on)


def _tensors(model: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """(all names, tensor) of parameters, and of the buffers that are saved."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    yield from ((names[id(param)], param) for param in model.parameters())
    persistent = model.state_dict().keys()
    yield from (([name], buffer) for name, buffer in model.named_buffers() if name in persistent)


def _at(spec: MeshSpec, place: int) -> dict[str, int]:
    """The place on each dense axis of the mesh's rank `place`."""
    at = {}
    for axis in reversed(DENSE_AXES):
        place, at[axis] = divmod(place, getattr(spec, axis))
    return at


def _part(
    name: str,
    region: Region,
    spec: MeshSpec,
    place: int,
    split: TensorLayout | None,
    experts: Mapping[str, ExpertLayout],
) -> Region:
    """What is left for one rank: split by tensor or expert ranks first, and then by fully_shard along dim 0."""
    folded = place % (spec.dp_shard * spec.cp * spec.tp)
    owner, _, key = name.rpartition(".")
    if owner in experts:
        shard, (expert, feature) = folded // (spec.ep * spec.etp), divmod(folded % (spec.ep * spec.etp), spec.etp)
        region = _narrow(_narrow(region, 0, spec.ep, expert), experts[owner].dims[key], spec.etp, feature)
        return _narrow(region, 0, spec.edp, shard)
    placement = split.params[name].placement if split is not None else None
    if isinstance(placement, Shard):
        region = _narrow(region, placement.dim, spec.tp, folded % spec.tp)
    return _narrow(region, 0, spec.dp_shard * spec.cp, folded // spec.tp)


def _narrow(region: Region, dim: int, parts: int, index: int) -> Region:
    start, stop = region[dim]
    own = chunk(stop - start, parts, index)
    return (*region[:dim], (start + own.start, start + own.stop), *region[dim + 1 :])
