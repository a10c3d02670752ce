"""Materialisation: from a model on meta (deferred initialisation), or with values, to this rank's tensors on its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshkit.core import _torch
from meshkit.core.sharding import local_tensor
from meshkit.errors import PlanError


def move(model: nn.Module, device: torch.device) -> None:
    """Put real parameters and buffers on the device, in place; parameters on meta stay there until they are shards."""
    for owner in model.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[key] = buffer.to(device)
    for param in model.parameters():
        if not param.is_meta:
            # The Parameter object stays: ties, and optimizers that were made before, refer to it.
            param.data = param.data.to(device)


def refuse_different_values(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raises: PlanError where ranks built different models, since each rank keeps a slice of its own values.

    Wire: one all-reduce of a sum for each parameter.
    """
    real = {name: param for name, param in model.named_parameters() if not param.is_meta}
    if not real or group.size() == 1:
        return
    sums = torch.stack([param.detach().double().abs().sum() for param in real.values()])
    extremes = torch.stack([sums, -sums])  # the largest of both says the smallest too, in one message
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    for name, high, low in zip(real, extremes[0], -extremes[1], strict=True):
        if high != low:
            raise PlanError(
                f"parallelize: the values of {name!r} differ between ranks. Call torch.manual_seed with one seed on every "
                "rank before building the model, or build it on meta and call init_weights."
            )


# [Note: parameters without memory]
# A run that moves holds the old shards until the new ones have their values, one after the other. So inside of
# `without_memory` a parameter that is made has its shape and its storage, and the storage has no bytes until `allocate` gives
# them. Not one that FSDP pads, of uneven parts: it copies that one when it is made, so it has its memory at once.

_hollow: ContextVar[bool] = ContextVar("hollow", default=False)


@contextmanager
def without_memory() -> Iterator[None]:
    """Inside, `materialize` makes parameters without memory, for `allocate`. Nothing may read them before."""
    token = _hollow.set(True)
    try:
        yield
    finally:
        _hollow.reset(token)


def allocate(tensor: Tensor) -> None:
    """Give a parameter its memory, if it has none; what is in it is undefined."""
    local = local_tensor(tensor)
    storage = local.untyped_storage()
    needed = (local.storage_offset() + local.numel()) * local.element_size()
    if storage.nbytes() < needed:
        storage.resize_(int(needed))


def release(tensor: Tensor, *, storage: bool = True) -> None:
    """Free the memory of this rank's shard, whoever else holds the tensor, which then has no elements.

    storage: False where other tensors lie in it too.
    """
    memory = local_tensor(tensor).untyped_storage()
    # The tensor first: to read one whose storage has no bytes ends the process.
    shard = _torch.shard_object(tensor) if isinstance(tensor, DTensor) else tensor
    if not hasattr(shard, "fsdp_pre_all_gather"):
        shard.data = torch.empty(0, dtype=shard.dtype, device=shard.device)
    if storage and memory.resizable():
        memory.resize_(0)


def _made(param: Tensor, device: torch.device) -> Tensor:
    if isinstance(param, DTensor):  # an operator on a DTensor takes many times as long as one on its shard
        made: Tensor = _torch.dtensor_like(param, torch.empty_like(local_tensor(param), device=device))
    else:
        made = torch.empty_like(param, device=device)
    if _hollow.get() and (type(made) is Tensor or (isinstance(made, DTensor) and _is_even(made))):
        local_tensor(made).untyped_storage().resize_(0)
    return made


def _is_even(tensor: DTensor) -> bool:
    parts = [1] * tensor.ndim
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():  # FSDP's over that of tp is another class than Shard
            parts[getattr(placement, "dim", 0)] *= tensor.device_mesh.size(axis)
    return all(size % count == 0 for size, count in zip(tensor.shape, parts, strict=True))


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters on meta, filled with NaN so that a forgotten initialisation is seen. Tied ones stay tied."""
    if not any(param.is_meta for param in model.parameters()):
        return
    # As `to_empty`, which gives each name a parameter of its own, and empties buffers, which are real: both are put back.
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in model.modules():
        for key, param in owner.named_parameters(recurse=False):
            tied.setdefault(id(param), []).append((owner, key))
    buffers = [(owner, key, buffer) for owner in model.modules() for key, buffer in owner._buffers.items()]
    model._apply(lambda tensor: _made(tensor, device))
    for owner, key, buffer in buffers:
        owner._buffers[key] = buffer
    for (first, first_key), *others in tied.values():
        for owner, key in others:
            owner._parameters[key] = first._parameters[first_key]
    for param in model.parameters() if not _hollow.get() else ():
        _poison(param)


def _poison(param: Tensor) -> None:
    local = local_tensor(param)
    if local.is_floating_point():
        local.fill_(torch.nan)
    elif local.dtype == torch.uint8:
        local.fill_(255)  # codes of a quantized weight: four bytes of 255 are an fp32 scale of NaN
