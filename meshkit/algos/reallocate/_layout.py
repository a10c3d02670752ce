"""Layout of a model (sharding map): which rank holds which part of each tensor, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from meshkit.core.reshard import Layout, Region, TensorRegions, volume
from meshkit.core.sharding import chunk
from meshkit.mesh import DENSE_AXES, MeshSpec
from meshkit.parallel.expert import ExpertLayout, expert_layouts, in_expert_view
from meshkit.parallel.pipeline import Generator, Schedule, plan_pipeline
from meshkit.parallel.tensor.layout import TensorLayout, tensor_layout
from meshkit.plan import Plan
from meshkit.plan.match import match_blocks


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
    """The layout that `parallelize(model, init_mesh(spec, ranks=ranks), plan=...)` gives; needs no process group, no values.

    model: as `parallelize` takes it, all of it; meta is enough. ranks: of the world, default 0, 1, ...
    dtype: of floating parameters, None keeps the model's. schedule, stages: with pp, as given to `parallelize`.
    Raises: MeshError or PlanError as `init_mesh` and `parallelize` do.
    """
    spec = MeshSpec.parse(spec) if isinstance(spec, str) else spec
    spec = spec.resolve(spec.world_size if ranks is None else len(ranks), part=ranks is not None)
    world_ranks = tuple(range(spec.world_size) if ranks is None else ranks)
    blocks = match_blocks(plan.blocks, dict(model.named_modules()))
    # The same functions that `parallelize` calls, on sizes alone: a layout of its own rules could differ from what is
    # really held.
    closed = dict.fromkeys(expert_layouts(model, plan.tensor, ep=spec.ep, etp=spec.etp), "experts")
    cut = (
        plan_pipeline(model, spec.pp, blocks=blocks, schedule=schedule, split=stages, closed=closed)
        if spec.pp > 1
        else None
    )
    split = tensor_layout(model, plan.tensor, size=spec.tp, sequence=False) if spec.tp > 1 else None
    experts = expert_layouts(model, plan.tensor, ep=spec.ep, etp=spec.etp) if in_expert_view(spec) else {}
    tensors = {}
    for names, tensor in _tensors(model):
        regions = {}
        for mesh_rank, rank in enumerate(world_ranks):
            # Tied parameters have several names, and each stage that uses one of them holds it.
            if cut is None or any(cut.runs(name, _coordinate(spec, mesh_rank)["pp"]) for name in names):
                all_of_it: Region = tuple((0, size) for size in tensor.shape)
                is_sharded = isinstance(tensor, nn.Parameter)  # every rank has all of a buffer
                regions[rank] = (
                    _shard(names[0], all_of_it, spec, mesh_rank, split, experts) if is_sharded else all_of_it
                )
        # Uneven sizes leave some ranks without a part; a transfer of nothing would be a message all the same.
        not_empty = {rank: region for rank, region in regions.items() if volume(region)}
        tensor_dtype = dtype if dtype is not None and isinstance(tensor, nn.Parameter) else tensor.dtype
        tensors[names[0]] = TensorRegions(tuple(tensor.shape), tensor_dtype, not_empty)
    return Layout(tensors, world_ranks)


def _tensors(model: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """(all names, tensor) of parameters, and of the buffers that are saved."""
    # Tied parameters are one tensor: by identity, so that it is moved once.
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    yield from ((names[id(param)], param) for param in model.parameters())
    persistent = model.state_dict().keys()
    yield from (([name], buffer) for name, buffer in model.named_buffers() if name in persistent)


def _coordinate(spec: MeshSpec, mesh_rank: int) -> dict[str, int]:
    """The coordinate of the mesh's rank on each dense axis."""
    coordinate = {}
    for axis in reversed(DENSE_AXES):  # the last axis varies fastest
        mesh_rank, coordinate[axis] = divmod(mesh_rank, getattr(spec, axis))
    return coordinate


def _shard(
    name: str,
    region: Region,
    spec: MeshSpec,
    mesh_rank: int,
    split: TensorLayout | None,
    experts: Mapping[str, ExpertLayout],
) -> Region:
    """The region of one rank: split over tp, or over ep and etp, first; then by fully_shard along dim 0."""
    # Experts fold dp_shard, cp and tp into one line of ranks, and cut it by ep and etp anew; only the ranks of one replica
    # and stage matter.
    folded = mesh_rank % (spec.dp_shard * spec.cp * spec.tp)
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
    # As torch.chunk: FSDP2 and DTensor give the first ranks ceil(size / parts).
    part = chunk(stop - start, parts, index)
    return (*region[:dim], (start + part.start, start + part.stop), *region[dim + 1 :])
