"""Copies between the host and a device that the host does not wait for: non-blocking, by pinned (page-locked) memory.

A tensor on a device remembers the tensor of the host that it was copied from: where documents begin decides what kernels are
launched, and a read from the device would wait for all that is queued there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_COPIED = "_meshkit_copied"
HOST = torch.device("cpu")
"""What tensors on the host have as device. `cpu:0`, which none has, stands for a device of its own in `preflight.waits`."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; itself where it is there already. The host goes on while it is copied.

    From pageable memory a copy that is called non-blocking is one only below 64 KiB, so it is pinned first: torch keeps
    pinned blocks for the next step, and does not give one away before its copy is done. Of whole numbers `on_host` knows the
    tensor that was copied.
    """
    if tensor.device == device:
        return tensor
    pins = tensor.device == HOST and device.type != "meta" and not torch.compiler.is_compiling()
    moved = (tensor.pin_memory() if pins and not tensor.is_pinned() else tensor).to(device, non_blocking=True)
    if pins and not tensor.is_floating_point():
        setattr(moved, _COPIED, (tensor, tensor._version, moved._version))
    return moved


def wait_for_device(device: torch.device) -> None:
    """The host waits for all that is queued there."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def on_host(tensor: Tensor) -> Tensor:
    """The tensor's values on the host. Waits for the device unless `to_device` moved it and nobody wrote to either since."""
    source, read, written = getattr(tensor, _COPIED, (None, 0, 0))
    if source is not None and (source._version, tensor._version) == (read, written):
        return source  # type: ignore[no-any-return]  # of the attribute
    return tensor.cpu()


def tensor_on(values: Sequence[int], device: torch.device, *, dtype: torch.dtype = torch.int64) -> Tensor:
    """`torch.tensor(values, device=device)`, for which the host would wait."""
    return to_device(torch.tensor(values, dtype=dtype), device)


@dataclass(frozen=True)
class Arriving:
    """A tensor on its way to the host. Called, it waits for the copy, and not for what was launched after it."""

    copy: Tensor
    done: torch.Event | None

    def __call__(self) -> Tensor:
        if self.done is not None:
            self.done.synchronize()
        return self.copy

    def is_here(self) -> bool:
        """Whether a call would not wait."""
        return self.done is None or self.done.query()


def copy_to_host(tensor: Tensor) -> Arriving:
    """Starts a copy."""
    if tensor.device == HOST:
        return Arriving(tensor, None)
    copy = tensor.to(HOST, non_blocking=True)  # into pinned memory
    done = torch.Event(tensor.device)
    done.record()
    return Arriving(copy, done)
