"""Timing on all ranks at once: the slowest or the fastest rank's seconds, which every rank is told."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
import torch.distributed as dist

from meshkit.mesh import host_ranks

LEAST_S = 0.02  # of a measurement: many calls of what is short
REPEATS = 5  # of which the median counts


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured on: device, and the ranks of the group that measure together; one without a group.

    fastest: seconds are the fastest rank's, else the slowest's.
    """

    device: torch.device
    group: dist.ProcessGroup | None = None
    fastest: bool = False

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def seconds(self, run: Callable[[], object]) -> float:
        """Of one call: the median of some repeats, all ranks running at the same time."""
        run()
        calls = 1
        while (took := self.timed(run, calls)) < LEAST_S:
            # Ranks that disagreed would call another number of collectives.
            calls = max(calls + 1, int(self.agreed(calls * min(10.0, 1.3 * LEAST_S / max(took, 1e-7)))))
        return statistics.median(self.timed(run, calls) for _ in range(REPEATS)) / calls

    def more_seconds(self, beside: Callable[[], object], run: Callable[[], object]) -> float:
        """By how much longer `beside` and `run` in turn take than `beside` alone, at least what `run` takes alone."""

        def both() -> None:
            beside()
            run()

        both()
        calls = max(2, ceil(LEAST_S / self.timed(both, 2) * 2))
        pairs = [(self.timed(both, calls), self.timed(beside, calls)) for _ in range(REPEATS)]
        return max(statistics.median(more - less for more, less in pairs) / calls, self.seconds(run))

    def timed(self, run: Callable[[], object], calls: int) -> float:
        if self.group is not None:
            host_ranks(self.group).barrier()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.agreed(time.perf_counter() - began)

    def agreed(self, value: float) -> float:
        """The slowest or fastest rank's, on all ranks."""
        if self.group is None:
            return value
        number = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MIN if self.fastest else dist.ReduceOp.MAX, group=self.group)
        return float(number)
