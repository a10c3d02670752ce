"""Streams of activation offload: asynchronous copies between accelerator (CUDA) and host; on a CPU plain copies.

Only this file knows streams and events. See [Note: who waits for whom].
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

# [Note: who waits for whom]
# The compute stream is the stream that is current where a tensor is saved or used.
# - A store waits for the work queued on compute so far, which includes the tensor's kernel. Compute does not wait for it.
# - A fetch writes into memory that was allocated on compute, so kernels queued before may still use it. It waits for those
#   (`mark`) and for the tensor's store.
# - Compute waits for a fetch before it reads the memory, or before the memory is freed unread.
# Therefore host memory may be reused as soon as compute has waited for the fetch from it: the next store waits for compute.


class Event(Protocol):
    """A moment on a stream."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Streams(Protocol):
    device: torch.device

    @property
    def waited_s(self) -> float:
        """By compute, for copies; on an accelerator of those that are over."""
        ...

    def slab(self, nbytes: int, *, pinned: bool = True) -> Tensor:
        """Host memory [nbytes] uint8, page-aligned, for an accelerator pinned if asked for."""
        ...

    def store(self, source: Tensor, target: Tensor) -> Event:
        """Copy device to host after what compute has queued. The caller keeps `source` until the event."""
        ...

    def mark(self) -> Event:
        """What compute has queued until now."""
        ...

    def fetch(self, source: Tensor, target: Tensor, after: tuple[Event, ...]) -> Event:
        """Copy host to device after these events. Called from any thread."""
        ...

    def wait(self, event: Event) -> None:
        """Let compute wait."""
        ...

    def finish(self) -> None:
        """The host waits for all that is queued on the device."""
        ...


def pages(nbytes: int) -> Tensor:
    """Page-aligned host memory, [nbytes] uint8; pages that nobody touches take none."""
    # Private, so that a forked child (a data loader, a sandbox) never writes into what this process stores.
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=torch.uint8)


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class CpuStreams:
    """Every copy is done when its call returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._done = _Done()

    def slab(self, nbytes: int, *, pinned: bool = True) -> Tensor:
        return pages(nbytes)

    def store(self, source: Tensor, target: Tensor) -> Event:
        target.copy_(source)
        return self._done

    def mark(self) -> Event:
        return self._done

    def fetch(self, source: Tensor, target: Tensor, after: tuple[Event, ...]) -> Event:
        target.copy_(source)
        return self._done

    def wait(self, event: Event) -> None:
        return None

    def finish(self) -> None:
        return None

    @property
    def waited_s(self) -> float:
        return 0.0


class AcceleratorStreams:
    """One stream out and one in, so that stores and fetches pass each other."""

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self._out, self._in = torch.Stream(self.device), torch.Stream(self.device)
        # Events around each wait that may have cost something, oldest first: read once they are over, so that measuring
        # never makes the host wait.
        self._waits: deque[tuple[torch.Event, torch.Event]] = deque()
        self._waited_s = 0.0

    @property
    def waited_s(self) -> float:
        self._count_waits()
        return self._waited_s

    def slab(self, nbytes: int, *, pinned: bool = True) -> Tensor:
        """On CUDA registered in place: torch's own pinned allocator rounds sizes up to a power of two."""
        if not pinned:
            return pages(nbytes)
        if self.device.type != "cuda":
            memory = torch.empty(nbytes + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=True)
            return memory.narrow(0, -memory.data_ptr() % mmap.PAGESIZE, nbytes)
        slab = pages(nbytes)
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            torch.cuda.check_error(int(runtime.cudaHostRegister(slab.data_ptr(), nbytes, 0)))
        # Not at exit: the driver may be gone by then, and with it the registration.
        weakref.finalize(slab, _unregister, slab.data_ptr(), slab.untyped_storage()).atexit = False
        return slab

    def store(self, source: Tensor, target: Tensor) -> Event:
        self._out.wait_stream(self._compute())
        with self._out:
            # No `record_stream`: `SavedStorage` keeps `source` until the event. With it, the caching allocator would hold the
            # memory back until some later allocation polls its events.
            target.copy_(source, non_blocking=True)
            return self._out.record_event()

    def mark(self) -> Event:
        return self._compute().record_event()

    def fetch(self, source: Tensor, target: Tensor, after: tuple[Event, ...]) -> Event:
        for event in after:
            assert isinstance(event, torch.Event)
            self._in.wait_event(event)
        with self._in:
            target.copy_(source, non_blocking=True)
            return self._in.record_event()

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.Event)
        if event.query():  # nothing to wait for, and what it wrote is visible to what is queued from now on
            return
        compute = self._compute()
        before, after = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        before.record(compute)
        compute.wait_event(event)
        after.record(compute)
        self._waits.append((before, after))
        self._count_waits()

    def finish(self) -> None:
        torch.accelerator.synchronize(self.device)

    def _compute(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def _count_waits(self) -> None:
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._waited_s += before.elapsed_time(after) / 1000


def _unregister(address: int, storage: torch.UntypedStorage) -> None:
    """storage: keeps the pages until they are no longer registered."""
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


def streams_of(device: torch.device) -> Streams:
    return CpuStreams() if device.type == "cpu" else AcceleratorStreams(device)


# Streams of an estimate: fake tensors are not copied; only the end of each copy is simulated.


class _Copy:
    def __init__(self, *, done: bool) -> None:
        self._done = done

    def query(self) -> bool:
        return self._done

    def synchronize(self) -> None:
        self._done = True


class FakeStreams:
    """late: a copy ends only when something waits for it, the latest possible on a GPU; else at once, as on a CPU."""

    waited_s = 0.0

    def __init__(self, device: torch.device, *, late: bool) -> None:
        self.device, self._late = device, late

    def slab(self, nbytes: int, *, pinned: bool = True) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def store(self, source: Tensor, target: Tensor) -> Event:
        return _Copy(done=not self._late)

    def mark(self) -> Event:
        return _Copy(done=True)

    def fetch(self, source: Tensor, target: Tensor, after: tuple[Event, ...]) -> Event:
        return _Copy(done=not self._late)

    def wait(self, event: Event) -> None:
        event.synchronize()

    def finish(self) -> None:
        return None
