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
from meshkit.core.calls import starvation_measured
from meshkit.errors import MeshkitError
from meshkit.faults.links import IN_A_ROW, SHARE, Link, LinkHistory, Sample, gather_links, samples_since
from meshkit.faults.watchdog import show_links
from meshkit.mesh import Mesh
from meshkit.mesh.ranges import ranges_in_words

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Report:
    """ranks: of the world, those of the mesh. busy_s: seconds in which each of them worked in a step, without its waits.
    hosts: of each. links: the matrix of the mesh, by axis; none on CUDA. step_s: of the quickest step, on the slowest rank.
    most_busy_s: as `busy_s`, of the slowest measured step, where that is of the quickest."""

    step: int
    ranks: tuple[int, ...]
    busy_s: tuple[float, ...]
    hosts: tuple[str, ...]
    links: tuple[Link, ...] = ()
    step_s: float = 0.0
    most_busy_s: tuple[float, ...] = ()

    @property
    def slowest(self) -> int:
        return self.ranks[self._at]

    @property
    def _at(self) -> int:
        return self.busy_s.index(max(self.busy_s))

    @property
    def over_median(self) -> float:
        """The slowest rank's work over the median of the ranks."""
        return max(self.busy_s) / statistics.median_low(self.busy_s)

    def has_straggler(self, factor: float) -> bool:
        """Whether the slowest rank works `factor` times as long as the median, a share of the step longer, and in its
        quickest step longer than others in their slowest."""
        works_s, others = max(self.busy_s), [*self.most_busy_s]
        if others:
            del others[self._at]
        longer = works_s - statistics.median_low(self.busy_s) > SHARE * self.step_s
        return self.over_median > factor and longer and (not others or works_s > statistics.median_low(others))

    @property
    def slow_links(self) -> tuple[Link, ...]:
        """Links whose calls take much longer than on others of the axis, or than they did; the worst first."""
        slow = [link for link in self.links if link.is_slow]
        return tuple(sorted(slow, key=lambda link: link.reference_s - link.wire_s))

    def scalars(self) -> dict[str, float]:
        """For a logger."""
        wires = {f"wire_s/{axis}": max(link.wire_s for link in self.links if link.axis == axis) for axis in self.axes}
        return {"slowest_rank": self.slowest, "slowest_over_median": self.over_median, **wires}

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(link.axis for link in self.links))

    def matrix(self) -> str:
        """A line for each link: axis, ranks, calls of a step, effective MB/s, seconds on the wire and for late ranks."""
        head = f"{'axis':<12} {'ranks':<14} {'calls':>6} {'MB/s':>9} {'wire_s':>9} {'late_s':>9}"
        rows = [
            f"{link.axis:<12} {ranges_in_words(link.ranks).partition(' ')[2]:<14} {link.calls:>6} "
            f"{link.bytes_per_s / 1e6:>9.3g} {link.wire_s:>9.2g} {link.late_s:>9.2g}"
            for link in self.links
        ]
        return "\n".join([head, *rows])

    def __str__(self) -> str:
        return (
            f"step {self.step}: rank {self.slowest} on {self.hosts[self._at]} is the slowest. It works "
            f"{max(self.busy_s):.3g} s a step, {self.over_median:.1f} times the median of {len(self.busy_s)} ranks, "
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

    A rank's work is that of its quickest measured step, so a step that was slow by chance names no rank, and neither does one
    report: where a rank or a link stands out, the next `steps` steps are measured too, and both must say so. On a CPU work is
    the time of the step minus waits for collectives and messages. On CUDA it is the time of the step minus the time in which
    the device ran collectives and nothing else, from the profiler.
    factor: how many times the median makes a straggler, if it is 5 % of a step more, too.
    last: the newest report; slow: the same if its slowest rank is a straggler, as in the one before. Same on every rank.
    slow_links: sentences on links whose calls take longer than on others of the axis; `last.matrix()` has all of them. A rank
    that is late makes no link slow, nor a slow link a rank: see `faults.links`. On a CPU alone.
    Every rank of the mesh calls it for every step.
    Wire: once in `every_steps` an all-gather of a number and a host name, and in each group of the mesh of the times of its
    calls, some 5 KB a rank. In other steps it does nothing but record calls, three microseconds each.
    """

    def __init__(self, mesh: Mesh, *, every_steps: int = 100, steps: int = 3, factor: float = 1.5) -> None:
        if not 1 <= steps <= every_steps or factor <= 1:
            raise MeshkitError(
                f"Stragglers(every_steps={every_steps}, steps={steps}, factor={factor}): measure at least 1 step of those, "
                "and give a factor above 1."
            )
        self._mesh, self._every, self._steps, self.factor = mesh, every_steps, steps, factor
        self._measured: list[float] = []
        self._walls: list[float] = []
        self._calls: list[list[Sample]] = []
        self._history = LinkHistory()
        self._again = 0  # steps to measure before the report that confirms the last
        self._slowest_in_a_row = 0  # reports in which the same rank was a straggler
        self.last: Report | None = None
        _torch.record_calls()

    @property
    def slow(self) -> Report | None:
        return self.last if self._slowest_in_a_row >= IN_A_ROW else None

    @property
    def slow_links(self) -> tuple[str, ...]:
        return () if self.last is None else tuple(map(str, self.last.slow_links))

    @contextmanager
    def measure(self, step: int) -> Iterator[None]:
        """Around the work of a step: data, forward, backward, optimizer."""
        # Steps 98, 99 and 100 of each 100: the last ones before the report, by the defaults.
        confirms, self._again = self._again, max(0, self._again - 1)
        if self._mesh.spec.world_size == 1 or (-step % self._every >= self._steps and not confirms):
            yield
            return
        on_host = self._mesh.device_type != "cuda"  # there a call's times are the host's, which goes on
        began = time.monotonic()
        with (_host_work if on_host else _device_work)() as work:
            yield
        self._measured.append(work.busy_s)
        self._walls.append(time.monotonic() - began)
        if on_host:
            self._calls.append(samples_since(began))
        if confirms == 1:
            self._report(step, confirms=True)
        elif step % self._every == 0 and not confirms:
            if self.last is not None and step - self.last.step < self._steps:  # a report just now: fewer steps are left
                self._measured, self._walls, self._calls = [], [], []
            else:
                self._report(step, confirms=False)

    def _report(self, step: int, *, confirms: bool) -> None:
        # The quickest step of each rank: noise only ever adds time.
        links = gather_links(self._mesh, self._calls)
        local = (min(self._measured), max(self._measured), socket.gethostname(), min(self._walls), links)
        self._measured, self._walls, self._calls = [], [], []
        gathered: list[tuple[float, float, str, float, list[Link]]] = [local] * self._mesh.spec.world_size
        dist.all_gather_object(gathered, local, group=self._mesh.group)
        work_s, step_s = tuple(busy_s for busy_s, *_ in gathered), max(wall_s for *_, wall_s, _ in gathered)
        found = [link for *_, own in gathered for link in own]
        of_rank = dict(zip(self._mesh.ranks, work_s, strict=True))
        before = self.last.slowest if self.last is not None and self._slowest_in_a_row else None
        self.last = Report(
            step=step,
            ranks=self._mesh.ranks,
            busy_s=work_s,
            hosts=tuple(host for _, _, host, *_ in gathered),
            links=self._history.compared(found, work_s=of_rank, step_s=step_s),
            step_s=step_s,
            most_busy_s=tuple(most_s for _, most_s, *_ in gathered),
        )
        again = before in (None, self.last.slowest)
        self._slowest_in_a_row = (self._slowest_in_a_row * again + 1) if self.last.has_straggler(self.factor) else 0
        # Alike on all ranks: they have gathered the same.
        new = self._slowest_in_a_row == 1 or any(link.in_a_row == 1 for link in self.last.links)
        self._again = self._steps if new and not confirms else 0
        show_links(self.last.links)


@dataclass
class _Work:
    """Of a step. busy_s: without waits for other ranks."""

    busy_s: float = 0.0


@contextmanager
def _host_work() -> Iterator[_Work]:
    """Yields what it fills in at the end: of this thread. Its calls know how long they starved."""
    work = _Work()
    with starvation_measured(), _torch.waits_timed() as waits:
        began = time.perf_counter()
        yield work
        work.busy_s = time.perf_counter() - began - waits.seconds


@contextmanager
def _device_work() -> Iterator[_Work]:
    """Yields what it fills in at the end: the step without the seconds in which the device ran collectives alone."""
    work = _Work()
    # Work of the step before must not be counted in this one.
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        yield work
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - began
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            # NCCL's kernels carry its name in every version (ncclDevKernel_..., ncclKernel_...).
            spans["nccl" in event.name].append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    work.busy_s = wall_s - uncovered_s(spans[True], spans[False])


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
