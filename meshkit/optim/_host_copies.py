"""Pinned host memory for offloaded optimizer state, and the stream that copies to and from it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshkit.core.host_accounting import made_on_host

ALIGNMENT = 64  # bytes: a cache line
CHUNK_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Place:
    """The position of a tensor: `offset` bytes into a chunk."""

    chunk: int
    offset: int


def place_tensors(sizes: Sequence[int], *, chunk_bytes: int = CHUNK_BYTES) -> tuple[list[Place], list[int]]:
    """(place of each tensor, bytes of each chunk) for tensors of these sizes in bytes, in order, none across two chunks.

    Chunks are powers of two, since PyTorch's allocator of pinned memory rounds up to one: a single slab of 33 GiB would
    pin 64 GiB. Pinning every tensor by itself takes minutes for a large model.
    """
    places: list[Place] = []
    chunks: list[int] = []
    used = chunk_bytes
    for size in sizes:
        if used + size > (chunks[-1] if chunks else 0):
            chunks.append(max(chunk_bytes, 1 << (size - 1).bit_length() if size else 0))
            used = 0
        places.append(Place(chunk=len(chunks) - 1, offset=used))
        used += -(-size // ALIGNMENT) * ALIGNMENT
    if chunks and chunks[-1] > used:  # the last one is no larger than it must be
        chunks[-1] = min(chunks[-1], max(ALIGNMENT, 1 << (used - 1).bit_length() if used else 0))
    return places, chunks


def host_tensors(like: Sequence[tuple[torch.Size, torch.dtype]], *, pinned: bool) -> list[Tensor]:
    """Contiguous host tensors of these shapes and dtypes, zero, in few allocations."""
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in like]
    places, chunks = place_tensors(sizes)

    def slab(size: int) -> Tensor:
        return made_on_host(lambda: torch.zeros(size, dtype=torch.uint8, pin_memory=pinned))

    slabs = [slab(chunk) for chunk in chunks]
    return [
        slabs[place.chunk][place.offset : place.offset + size].view(dtype).view(shape)
        for place, size, (shape, dtype) in zip(places, sizes, like, strict=True)
    ]


class Carrier:
    """Asynchronous copies between device and host on a stream of their own; plain copies if the device is the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_host = device.type == "cpu"
        self._device = device
        self._stream: Any = None if self.on_host else torch.Stream(device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue target = source after the work of the current stream. `target` is ready after `wait`."""
        if self.on_host:
            target.copy_(source)
            return
        # The source may still be being computed, and the target still be read, on the current stream.
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.device.type != "cpu":
                tensor.record_stream(self._stream)  # the caching allocator reuses its memory only after the copy

    def mark(self) -> Any:
        """An event after all copies so far; the host waits for it by `synchronize()`."""
        return _Passed() if self.on_host else self._stream.record_event()

    def wait(self) -> None:
        """The host waits for all copies."""
        if not self.on_host:
            self._stream.synchronize()

    def before_compute(self) -> None:
        """The current stream waits for all copies; the host does not."""
        if not self.on_host:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)


class _Passed(contextlib.nullcontext[None]):
    def synchronize(self) -> None:
        pass
