"""Shards: where a rank's part of a tensor lies in the full tensor, for plain tensors and DTensors alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from meshkit.core import _torch


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing storage, outside autograd; a plain tensor is its own shard.

    `detach` comes last: so the shard also shares the counter of in-place writes (`_version`), which autograd checks; the
    shard of a detached DTensor would not.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(local, "fsdp_pre_all_gather"):  # a weight that travels in another dtype wraps its values
        local = local._tensor  # type: ignore[attr-defined]  # torchao's
    return local.detach()


def placed(param: Tensor, local: Tensor) -> Tensor:
    """`local`, this rank's shard of something, as a tensor with the mesh and placements of `param`; plain for a plain one."""
    return _torch.dtensor_like(param, local) if isinstance(param, DTensor) else local


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """The region of the full tensor that this rank holds: one slice per dim, possibly empty.

    Exact for uneven shards, for ranks that hold nothing, and for FSDP over tensor parallelism. No communication.
    """
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = _torch.global_offset(tensor)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def plain_value(value: Any) -> Any:
    """A scalar DTensor's whole value, as a loss of logits that are split over the vocabulary is; with its gradients."""
    return value.full_tensor() if isinstance(value, DTensor) and not value.ndim else value


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor on every rank of its mesh, where the shards are: those that an optimizer has on the host travel by way
    of the device, whose group is the only one. Wire: all-gathers over the axes that shard it (a collective)."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    shard, device = local_tensor(tensor), tensor.device_mesh.device_type
    if shard.device.type != device:
        return full_tensor(placed(tensor, shard.to(device))).to(shard.device)
    with torch.no_grad():
        # Axis by axis from the outermost, the order in which FSDP over TP (_StridedShard) can be undone; redistributing all
        # axes at once warns on every rank.
        for axis in range(tensor.device_mesh.ndim):
            placements = [Replicate() if index <= axis else p for index, p in enumerate(tensor.placements)]
            if tuple(placements) != tensor.placements:
                tensor = tensor.redistribute(placements=placements)
        return tensor.to_local()


def chunk(size: int, parts: int, index: int) -> slice:
    """Part `index` of `size` split over `parts`, as torch.chunk and DTensor's Shard split it: the last may be empty."""
    length = -(-size // parts)
    return slice(min(index * length, size), min((index + 1) * length, size))


def even_part(size: int, parts: int, index: int) -> range:
    """Part `index` of range(size): sizes differ by at most one, and none is empty when size >= parts."""
    return range(index * size // parts, (index + 1) * size // parts)
