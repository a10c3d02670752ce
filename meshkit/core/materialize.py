"""Materialisation: from a model on meta (deferred initialisation), or with values, to this rank's tensors on its device."""

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


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters on meta, filled with NaN so that a forgotten initialisation is seen. Tied ones stay tied."""
    if not any(param.is_meta for param in model.parameters()):
        return
    # `to_empty` gives each name a parameter of its own, and empties buffers, which are real: both are put back after it.
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
        local.fill_(255)  # codes of a quantized weight: four bytes of 255 are an fp32 scale of NaN
