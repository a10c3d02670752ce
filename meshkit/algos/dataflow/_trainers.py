"""Trainers of a stream: they take whole groups of rollouts from the buffer, as soon as its rule allows, and learn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from meshkit.algos.dataflow._buffer import Buffer
from meshkit.algos.dataflow._call import SOURCE, Call, Sample, run_call
from meshkit.algos.dataflow._exchange import share
from meshkit.algos.dataflow._flow import data_ranks
from meshkit.algos.dataflow._guard import Guard
from meshkit.algos.dataflow._mailbox import Mailbox
from meshkit.core.waiting import waiting
from meshkit.errors import StepError
from meshkit.mesh import Mesh

PAUSE_S = 0.002  # between two looks at what another rank has done
LOOK_S = 1.0  # between two looks at whether one has failed
LATE = "Generators have ended or are slow: look at what they printed, or give the flow a longer timeout."


class Trainers:
    """The ranks of a mesh that learn. Their first rank has the buffer; whole groups are in the mailbox as `group/N`.

    read: brings the buffer up to date, on the first rank. lock: around each look at the buffer, where threads write it.
    timeout: how long they wait for rollouts. late: why these may not have come, and what to do, as the error says it.
    """

    def __init__(
        self,
        mesh: Mesh,
        buffer: Buffer,
        mail: Mailbox,
        guard: Guard,
        *,
        read: Callable[[], None],
        timeout: timedelta,
        lock: AbstractContextManager[object] | None = None,
        late: Callable[[], str] = lambda: LATE,
    ) -> None:
        self._buffer, self._mail, self._guard, self._read = buffer, mail, guard, read
        self._timeout_s, self._lock, self._late = timeout.total_seconds(), lock or nullcontext(), late
        self._data_ranks, self._rank = data_ranks(mesh), dist.get_rank()
        self._is_first = self._rank == mesh.ranks[0]

    def train(
        self, step: int, calls: Sequence[Call], group: dist.ProcessGroup, seconds: dict[str, float]
    ) -> list[Sample]:
        """Take the groups of this step and run the calls on them; returns this rank's samples. group: of the trainers, on
        the host. seconds: gets those of each call, and of `wait`.

        Wire: a broadcast of numbers over the trainers, and each group from the store for each rank that learns from it.
        Raises: StepError where rollouts do not come in time.
        """
        chosen = self._take(step, group, seconds)
        mine = share(len(chosen), self._data_ranks, self._rank)
        samples = [{**sample, SOURCE: index} for index in mine for sample in self._mail.get(f"group/{chosen[index]}")]
        # All have read: no rank is slower than this meeting.
        self._guard.meet(f"iteration {step}, taken", group)
        if self._is_first:
            for number in chosen:
                self._mail.delete(f"group/{number}")
        for call in calls:
            samples = timed(call, samples, f"iteration {step}, call {call.name}", self._guard, seconds)
        return samples

    def _take(self, step: int, group: dist.ProcessGroup, seconds: dict[str, float]) -> list[int]:
        """The groups of this step, the same on all trainers."""
        began = time.monotonic()
        with self._lock:
            groups = self._buffer.groups
            numbers = torch.full((groups.before(step + 1) - groups.before(step),), -1)
        if self._is_first:
            with waiting(f"rollouts of iteration {step}"):
                chosen = self._ready(step, began)
            if chosen:
                numbers.copy_(torch.tensor(chosen))
        self._guard.meet(f"iteration {step}, take", group, numbers)
        seconds["wait"] += time.monotonic() - began
        return numbers.tolist()

    def _ready(self, step: int, began: float) -> list[int]:
        looked = began
        while True:
            with self._lock:
                self._read()
                chosen = self._buffer.take(step)
            if chosen is not None:
                return chosen
            time.sleep(PAUSE_S)
            now = time.monotonic()
            if now - looked > LOOK_S:
                looked = now
                self._guard.raise_failure()
            if now - began > self._timeout_s:
                raise StepError(
                    f"iteration {step}: {len(self._buffer.ready)} groups of rollouts are ready after "
                    f"{self._timeout_s:.0f} s, and the next ones are not. {self._late()}"
                )


def timed(call: Call, samples: list[Sample], what: str, guard: Guard, seconds: dict[str, float]) -> list[Sample]:
    """What the call makes of the samples, or these, where it returns nothing. seconds: gets its own."""
    began = time.perf_counter()
    with guard.reports_failure(what):
        returned = run_call(call, samples, what)
    seconds[call.name] = seconds.get(call.name, 0.0) + time.perf_counter() - began
    return samples if returned is None else returned
