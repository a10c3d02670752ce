"""Values of a run that moves: tensors in batches from the old layout to the new, and the old ones freed behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshkit.core import _torch
from meshkit.core.materialize import allocate, release
from meshkit.core.model_state import copies_of, model_tensors
from meshkit.core.reshard import (
    DEFAULT_BUCKET_BYTES,
    Exchange,
    Layout,
    ReallocationPlan,
    Region,
    Shards,
    TensorRegions,
    Transfer,
    plan_reallocation,
    region_of,
    volume,
)
from meshkit.core.sharding import local_tensor
from meshkit.mesh import Mesh
from meshkit.mesh.world import ranks_per_node
from meshkit.moving._agree import gathered
from meshkit.step import Run

Held = dict[str, tuple[tuple[int, ...], torch.dtype, Region]]
"""By key, what a rank has of a tensor: (its full shape, dtype, region)."""


def move_model(old: Run, new: Run, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> ReallocationPlan:
    """Parameters and persistent buffers, from a run into one that has no values yet. See `move_tensors`."""
    tensors, before = model_tensors(new.model), model_tensors(old.model)
    # The parameters themselves, of which the others are aliases: who holds one after the move finds it empty.
    copies = copies_of(old.model)
    before |= {copies.get(name, name): param for name, param in old.named_parameters()}
    plan = move_tensors(old.mesh, before, held(tensors), tensors.__getitem__, bucket_bytes)
    # Copies into detached shards leave the versions of parameters as they are; whoever keeps a copy of one looks at them.
    torch.autograd.graph.increment_version([*tensors.values()])
    return plan


def held(tensors: Mapping[str, Tensor]) -> Held:
    return {key: (tuple(each.shape), local_tensor(each).dtype, region_of(each)) for key, each in tensors.items()}


def move_tensors(
    mesh: Mesh, old: Mapping[str, Tensor], wanted: Held, make: Callable[[str], Tensor], bucket_bytes: int
) -> ReallocationPlan:
    """Move tensors by key, about `bucket_bytes` at a time, or a single one; then the memory of these in `old` is freed.

    make: the tensor of a key of `wanted`, perhaps without memory.
    Wire: an all-gather over the mesh of what each rank holds and wants, as objects; then the plan that is returned.
    """
    own = held(old)
    told = gathered(mesh, lambda: (own, wanted))
    src, dst = (_layout([each[side] for each in told], mesh.ranks) for side in (0, 1))
    per_node = ranks_per_node()
    users = Counter(_torch.storage_key(local_tensor(tensor)) for tensor in old.values())
    rounds, copies, lower_bound = list[tuple[Transfer, ...]](), list[Transfer](), 0
    for keys in _batches(dst, bucket_bytes):
        plan = plan_reallocation(
            _part(src, keys), _part(dst, keys), exact=True, bucket_bytes=bucket_bytes, ranks_per_node=per_node
        )
        targets = {key: make(key) for key in keys if key in wanted}
        for target in targets.values():
            allocate(target)
        sources = {key: old[key] for key in keys if key in old}
        Exchange(plan, mesh.group, mesh.device)(Shards(sources), Shards(targets))
        for source in sources.values():
            # A slab that several tensors lie in goes with the last of them.
            key = _torch.storage_key(local_tensor(source))
            users[key] -= 1
            release(source, storage=not users[key])
        rounds += plan.rounds
        copies += plan.copies
        lower_bound += plan.lower_bound_bytes
    return ReallocationPlan(
        rounds=tuple(rounds),
        copies=tuple(copies),
        lower_bound_bytes=lower_bound,
        bucket_bytes=bucket_bytes,
        ranks_per_node=per_node,
    )


def _layout(of_ranks: Sequence[Held], ranks: tuple[int, ...]) -> Layout:
    regions: dict[str, dict[int, Region]] = {}
    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for rank, of_rank in zip(ranks, of_ranks, strict=True):
        for key, (shape, dtype, region) in of_rank.items():
            kinds[key] = shape, dtype
            regions.setdefault(key, {}).update({rank: region} if volume(region) else {})
    return Layout({key: TensorRegions(*kind, regions[key]) for key, kind in kinds.items()}, ranks)


def _part(layout: Layout, keys: Sequence[str]) -> Layout:
    return Layout({key: layout.tensors[key] for key in keys}, layout.ranks)


def _batches(layout: Layout, most_bytes: int) -> Iterator[list[str]]:
    """Keys in order; the tensors of each batch have at most so many bytes on any rank, but where a single one has more."""
    batch, batch_bytes = list[str](), 0
    for key, tensor in layout.tensors.items():
        most = max(map(volume, tensor.regions.values()), default=0) * tensor.dtype.itemsize
        if batch and batch_bytes + most > most_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(key)
        batch_bytes += most
    if batch:
        yield batch
