"""Streams of an estimate: tensors have no values, so nothing is copied, and only when a copy would be over is told."""

from __future__ import annotations

import torch
from torch import Tensor

from meshkit.memory.offload._streams import Event


class _Copy:
    def __init__(self, *, done: bool) -> None:
        self._done = done

    def query(self) -> bool:
        return self._done

    def synchronize(self) -> None:
        self._done = True


class ValuelessStreams:
    """late: a copy is over only once somebody waits for it, the latest that can be on a GPU; else at once, as on a CPU."""

    waited_s = 0.0

    def __init__(self, device: torch.device, *, late: bool) -> None:
        self.device, self._late = device, late

    def slab(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def store(self, source: Tensor, target: Tensor) -> Event:
        return _Copy(done=not self._late)

    def mark(self) -> Event:
        return _Copy(done=True)

    def fetch(self, source: Tensor, target: Tensor, after: tuple[Event, ...]) -> Event:
        return _Copy(done=not self._late)

    def wait(self, event: Event) -> None:
        event.synchronize()
