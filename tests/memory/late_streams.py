"""Streams on a CPU that copy as late as they may, and refuse what a device would silently get wrong."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch
from torch import Tensor

from meshkit.memory.offload._streams import Event, pages

POISON = 0xA5


class _Copy:
    """A queued copy and the event of its end. The device's side is not held: whoever asked for the copy has to."""

    def __init__(self, streams: LateStreams, queue: deque[_Copy], device: Tensor, host: Tensor, *, out: bool) -> None:
        self.device, self.host, self.out = weakref.ref(device), host, out
        self.queue, self.streams, self.done = queue, streams, False
        self.after: tuple[Event, ...] = ()

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        with self.streams.lock:
            while not self.done:
                first = self.queue.popleft()
                for event in first.after:
                    event.synchronize()
                device = first.device()
                assert device is not None, "the device's memory was freed before the copy"
                if first.out:
                    first.host.copy_(device)
                else:
                    device.copy_(first.host)
                first.done = True
                self.streams.copies += 1


class _Now:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class LateStreams:
    """Compute runs at once; the streams out and in run when somebody waits for them."""

    def __init__(self) -> None:
        self.device, self.waited_s, self.copies = torch.device("cpu"), 0.0, 0
        self.lock = threading.RLock()
        self._out: deque[_Copy] = deque()
        self._in: deque[_Copy] = deque()

    def slab(self, nbytes: int, *, pinned: bool = True) -> Tensor:
        return pages(nbytes)

    def store(self, source: Tensor, target: Tensor) -> Event:
        target.fill_(POISON)
        return self._queue(self._out, _Copy(self, self._out, source, target, out=True))

    def mark(self) -> Event:
        return _Now()

    def fetch(self, source: Tensor, target: Tensor, after: tuple[Event, ...]) -> Event:
        target.fill_(POISON)
        copy = _Copy(self, self._in, target, source, out=False)
        copy.after = after
        return self._queue(self._in, copy)

    def wait(self, event: Event) -> None:
        event.synchronize()

    def finish(self) -> None:
        for copy in (*self._out, *self._in):
            copy.synchronize()

    def _queue(self, queue: deque[_Copy], copy: _Copy) -> Event:
        with self.lock:
            queue.append(copy)
        return copy
