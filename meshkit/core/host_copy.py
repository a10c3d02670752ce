"""Host copies: a tensor on a device remembers the tensor of the host that it was copied from, so that nobody waits for it.

Where documents begin decides what kernels are launched, and a read from the device would wait for all that is queued there.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HOST = "_meshkit_on_host"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor.to(device, non_blocking=True)`, of which `on_host` knows whole numbers."""
    moved = tensor.to(device, non_blocking=True)
    if moved is not tensor and tensor.device.type == "cpu" and not tensor.is_floating_point():
        setattr(moved, _HOST, (tensor, tensor._version, moved._version))
    return moved


def on_host(tensor: Tensor) -> Tensor:
    """The tensor's values on the host. Waits for the device unless `to_device` moved it and nobody wrote to either since."""
    source, read, written = getattr(tensor, _HOST, (None, 0, 0))
    if source is not None and (source._version, tensor._version) == (read, written):
        return source  # type: ignore[no-any-return]  # of the attribute
    return tensor.cpu()
