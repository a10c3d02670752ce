"""Which rank keeps the others waiting: in a step of collectives all ranks take the same time, but not the same work."""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from meshkit.core import _torch
from meshkit.errors import MeshkitError
from meshkit.mesh import Mesh

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Report:
    """busy_s: seconds of its own work that each rank of the mesh had in a step; hosts: where each is."""

    step: int
    busy_s: tuple[float, ...]
    hosts: tuple[str, ...]

    @property
    def slowest(self) -> int:
        return max(range(len(self.busy_s)), key=self.busy_s.__getitem__)

    @property
    def over_median(self) -> float:
        """The slowest rank's work over the median of the ranks."""
        return self.busy_s[self.slowest] / statistics.median_low(self.busy_s)

    def scalars(self) -> dict[str, float]:
        """For a logger."""
        return {"slowest_rank": self.slowest, "slowest_over_median": self.over_median}

    def __str__(self) -> str:
        return (
            f"step {self.step}: rank {self.slowest} on {self.hosts[self.slowest]} is the slowest. It works "
            f"{self.busy_s[self.slowest]:.3g} s a step, {self.over_median:.1f} times the median of {len(self.busy_s)} ranks, "
            "and the others wait for it."
        )


class Stragglers:
    """Every `every_steps` steps, measures `steps` of them on every rank, without what it waits for others.

        with stragglers.measure(step):
            batch = next(loader)
            ...
            optimizer.step()
        if stragglers.slow:
            print(stragglers.slow)

    A rank's work is that of its quickest measured step, so a step that was slow by chance names nobody. On a CPU it is the
    time of the step without its waits for collectives and messages. On CUDA it is the time of the step without that in which
    the device ran collectives and nothing else, as the profiler has it.
    factor: how many times the median makes a straggler.
    last: the newest report; slow: the same if its slowest rank is a straggler, until the next one. Same on every rank.
    Every rank of the mesh calls it for every step.
    Wire: an all-gather of a number and a host name, once in `every_steps`. In other steps it does nothing.
    """

    def __init__(self, mesh: Mesh, *, every_steps: int = 100, steps: int = 3, factor: float = 1.5) -> None:
        if not 1 <= steps <= every_steps or factor <= 1:
            raise MeshkitError(
                f"Stragglers(every_steps={every_steps}, steps={steps}, factor={factor}): measure at least 1 step of those, "
                "and give a factor above 1."
            )
        self._mesh, self._every, self._steps, self.factor = mesh, every_steps, steps, factor
        self._measured: list[float] = []
        self.last: Report | None = None

    @property
    def slow(self) -> Report | None:
        return self.last if self.last is not None and self.last.over_median > self.factor else None

    @contextmanager
    def measure(self, step: int) -> Iterator[None]:
        """Around the work of a step: data, forward, backward, optimizer."""
        if self._mesh.spec.world_size == 1 or -step % self._every >= self._steps:
            yield
            return
        measured = _device_busy if self._mesh.device_type == "cuda" else _host_busy
        with measured() as busy_s:
            yield
        self._measured += busy_s
        if step % self._every == 0:
            self._report(step)

    def _report(self, step: int) -> None:
        own = (min(self._measured), socket.gethostname())
        self._measured = []
        found: list[tuple[float, str]] = [own] * self._mesh.spec.world_size
        dist.all_gather_object(found, own, group=self._mesh.group)
        self.last = Report(
            step=step, busy_s=tuple(busy_s for busy_s, _ in found), hosts=tuple(host for _, host in found)
        )


@contextmanager
def _host_busy() -> Iterator[list[float]]:
    """Afterwards holds the seconds in which this thread did not wait for others."""
    busy_s: list[float] = []
    began = time.perf_counter()
    with _torch.waits_timed() as waits_s:
        yield busy_s
    busy_s.append(time.perf_counter() - began - sum(waits_s))


@contextmanager
def _device_busy() -> Iterator[list[float]]:
    """Afterwards holds the seconds of the step without those in which the device ran collectives and nothing else."""
    busy_s: list[float] = []
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        yield busy_s
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - began
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            spans["nccl" in event.name].append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    busy_s.append(wall_s - alone(spans[True], spans[False]))


def alone(some: Sequence[Span], others: Sequence[Span]) -> float:
    """The length of what `some` cover and `others` do not."""
    return _covered([*some, *others]) - _covered(others)


def _covered(spans: Sequence[Span]) -> float:
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
