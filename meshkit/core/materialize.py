"""From a model on meta, or with values, to this rank's tensors on the mesh's device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
            param.data = param.data.to(device)


def refuse_different_values(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sharding keeps this rank's slice of this rank's values: they must be one model. Wire: one all-reduce of sums."""
    real = {name: param for name, param in model.named_parameters() if not param.is_meta}
    if not real or group.size() == 1:
        return
    sums = torch.stack([param.detach().double().abs().sum() for param in real.values()])
    extremes = torch.stack([sums, -sums])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    for name, high, low in zip(real, extremes[0], -extremes[1], strict=True):
        if high != low:
            raise PlanError(
                f"parallelize: the values of {name!r} differ between ranks. Call torch.manual_seed with one seed on every "
                "rank before building the model, or build it on meta and call init_weights."
            )


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate what is on meta, filled with NaN so that a forgotten initialisation is seen. Tied stays tied."""
    meta = [param for param in model.parameters() if param.is_meta]
    if not meta:
        return
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in model.modules():
        for key, param in owner.named_parameters(recurse=False):
            tied.setdefault(id(param), []).append((owner, key))
    buffers = [(owner, key, buffer) for owner in model.modules() for key, buffer in owner._buffers.items()]
    model.to_empty(device=device)
    for owner, key, buffer in buffers:
        owner._buffers[key] = buffer
    for (first, first_key), *others in tied.values():
        for owner, key in others:
            owner._parameters[key] = first._parameters[first_key]
    for param in model.parameters():
        _poison(param)


def _poison(param: Tensor) -> None:
    local = local_tensor(param)
    if local.is_floating_point():
        local.fill_(torch.nan)
    elif local.dtype == torch.uint8:
        local.fill_(255)  # a frozen weight's codes: four such bytes are a scale that is not a number
