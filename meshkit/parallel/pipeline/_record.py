"""Measured timelines of pipeline steps: start and end of each task, on a clock that the ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from meshkit.core.to_device import wait_for_device
from meshkit.mesh import host_ranks
from meshkit.parallel.pipeline._simulate import Times
from meshkit.parallel.pipeline._table import Op, Schedule, Task


class Measured(NamedTuple):
    """A task's start and end without the wait for its messages, in seconds since a barrier of all ranks."""

    rank: int
    task: Task
    start_s: float
    end_s: float


class _Clock(Protocol):
    def stamp(self) -> object: ...
    def seconds(self, stamp: object) -> float: ...


class _HostClock:
    def __init__(self) -> None:
        self.zero = perf_counter()

    def stamp(self) -> float:
        return perf_counter()

    def seconds(self, stamp: object) -> float:
        assert isinstance(stamp, float)
        return stamp - self.zero


class _DeviceClock:
    """Times at which the device reaches a point of its stream, not at which the host queues it. Nothing waits until read."""

    def __init__(self, device: torch.device) -> None:
        # The zero event is recorded on an idle device, so that it is not delayed by work of before.
        torch.accelerator.synchronize(device)
        self.device = device
        self.zero = self.stamp()

    def stamp(self) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: object) -> float:
        assert isinstance(stamp, torch.Event)
        # elapsed_time raises while the device has not reached the event.
        stamp.synchronize()
        return float(self.zero.elapsed_time(stamp)) / 1e3


class Recording:
    """One rank's tasks of a step, while a pipeline records. Made by `Pipeline.record`."""

    def __init__(self, group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
        """Wire: a barrier, whose end is time 0 on every rank."""
        self.group, self.rank = group, rank
        # The clocks of ranks are not synchronised: the end of a barrier is the one moment that all of them know.
        wait_for_device(device)
        host_ranks(group).barrier()
        self._clock: _Clock = _HostClock() if device.type == "cpu" else _DeviceClock(device)
        self._stamps: list[tuple[Task, object, object]] = []
        self.schedule: Schedule | None = None  # of the last step

    def begin(self, schedule: Schedule) -> None:
        """Forget the step before."""
        self.schedule = schedule
        self._stamps.clear()

    @contextmanager
    def measure(self, task: Task) -> Iterator[None]:
        # No `finally`: a task that raised has no end to record.
        start = self._clock.stamp()
        yield
        self._stamps.append((task, start, self._clock.stamp()))

    def gather(self) -> list[Measured]:
        """The measured tasks of all ranks of the axis, on each of them. Wire: one all-gather of objects."""
        local = [
            Measured(self.rank, task, self._clock.seconds(start), self._clock.seconds(end))
            for task, start, end in self._stamps
        ]
        by_rank: list[list[Measured]] = [[] for _ in range(dist.get_world_size(self.group))]
        dist.all_gather_object(by_rank, local, group=self.group)
        return [measured for tasks in by_rank for measured in tasks]


def times_of(measured: Sequence[Measured], schedule: Schedule) -> Times:
    """Times for `simulate`: the mean of each op in each stage. Messages are not measured and count as free."""

    def per_stage(op: Op) -> tuple[float, ...]:
        return tuple(
            fmean(spans) if (spans := [m.end_s - m.start_s for m in measured if m.task[:2] == (op, stage)]) else 0.0
            for stage in range(schedule.stages)
        )

    # Where W has rows of its own and no whole backward ran, there is nothing to average: `simulate` then takes I + W.
    b_s = None if schedule.splits_backward and not any(m.task.op == "B" for m in measured) else per_stage("B")
    return Times(f_s=per_stage("F"), i_s=per_stage("I"), w_s=per_stage("W"), b_s=b_s)
