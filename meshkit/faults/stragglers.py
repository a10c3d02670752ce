"""Stragglers: slow ranks, found by the time a rank works without waiting for others. A step takes all ranks the same time."""

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
    """busy_s: seconds in which each rank of the mesh worked in a step, without its waits. hosts: of each rank."""

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
    """Measures, every `every_steps` steps, the work of `steps` steps on every rank, without its waits for other ranks.

        with stragglers.measure(step):
            batch = next(loader)
            ...
            optimizer.step()
        if stragglers.slow:
            print(stragglers.slow)

    A rank's work is that of its quickest measured step, so a step that was slow by chance names no rank. On a CPU it is the
    time of the step minus waits for collectives and messages. On CUDA it is the time of the step minus the time in which
    the device ran collectives and nothing else, from the profiler.
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
        # Steps 98, 99 and 100 of each 100: the last ones before the report, by the defaults.
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
        # The quickest step of each rank: noise only ever adds time.
        local = (min(self._measured), socket.gethostname())
        self._measured = []
        gathered: list[tuple[float, str]] = [local] * self._mesh.spec.world_size
        dist.all_gather_object(gathered, local, group=self._mesh.group)
        self.last = Report(
            step=step, busy_s=tuple(busy_s for busy_s, _ in gathered), hosts=tuple(host for _, host in gathered)
        )


@contextmanager
def _host_busy() -> Iterator[list[float]]:
    """Yields a list that then gets the seconds in which this thread did not wait for other ranks."""
    busy_s: list[float] = []
    began = time.perf_counter()
    with _torch.waits_timed() as waits_s:
        yield busy_s
    busy_s.append(time.perf_counter() - began - sum(waits_s))


@contextmanager
def _device_busy() -> Iterator[list[float]]:
    """Yields a list that then gets the seconds of the step minus those in which the device ran collectives alone."""
    busy_s: list[float] = []
    # Work of the step before must not be counted in this one.
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        yield busy_s
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - began
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            # NCCL's kernels carry its name in every version (ncclDevKernel_..., ncclKernel_...).
            spans["nccl" in event.name].append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    busy_s.append(wall_s - uncovered_s(spans[True], spans[False]))


def uncovered_s(spans: Sequence[Span], other_spans: Sequence[Span]) -> float:
    """The time that `spans` cover and `other_spans` do not."""
    # |A or B| - |B|: communication that is hidden behind computation costs the rank nothing.
    return _covered_s([*spans, *other_spans]) - _covered_s(other_spans)


def _covered_s(spans: Sequence[Span]) -> float:
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
