"""Guard against hangs in a dataflow: ranks meet before each row; a rank that failed or does not come is named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshkit.core import _torch
from meshkit.core.waiting import waiting
from meshkit.errors import StepError

LOOK_S = 1.0
"""seconds between two looks of a waiting rank at whether another one has failed"""


class Guard:
    """A meeting of ranks before each row. name: the same on every rank, and unique in the world.

    timeout: how long ranks wait for one that is busy elsewhere; it must be longer than the longest row.
    Wire: for each row a barrier of its ranks, or an all-reduce of numbers, and from each one request to the store that the
    world was made with.
    """

    def __init__(self, name: str, *, timeout: timedelta) -> None:
        self._store, self._name, self._timeout_s = _torch.world_store(), name, timeout.total_seconds()
        self._rank, self._at = dist.get_rank(), ""

    def meet(self, row: str, group: ProcessGroup, numbers: Tensor | None = None) -> None:
        """Return when all ranks of the group are here; each comes with the same rows in the same order.

        numbers: on the host, replaced by the largest of all ranks.
        Raises: StepError with the error a rank left with, or after `timeout` with the ranks that are elsewhere, and where.
        """
        if row != self._at:  # else the store has it already
            self._store.set(f"{self._name}/at/{self._rank}", row)
            self._at = row
        began = time.monotonic()
        # One mark around the whole loop: the watchdog must see a waiting rank at any time, also while it reads the store.
        with waiting(f"the ranks of {row}"):
            self._meet(row, group, numbers, began)

    def _meet(self, row: str, group: ProcessGroup, numbers: Tensor | None, began: float) -> None:
        looked = began
        # Asynchronous, so that the rank can look at the store while it waits: a barrier alone would only time out.
        if numbers is None:
            meeting = dist.barrier(group=group, async_op=True)
        else:
            meeting = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group, async_op=True)
        pause_s = 1e-4
        while not meeting.is_completed():
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.01)
            now = time.monotonic()
            if now - looked > LOOK_S:
                looked = now
                self.raise_failure()
            if now - began > self._timeout_s:
                raise StepError(self._absent(row, group)) from dist.DistError("a barrier has timed out")
        try:
            meeting.wait()
        except RuntimeError as error:  # a connection is gone, and with it a rank
            self.raise_failure()
            raise StepError(self._absent(row, group)) from error

    @contextmanager
    def reports_failure(self, row: str) -> Iterator[None]:
        """Writes an error raised within it to the store, for the ranks that wait for this one at a later row."""
        try:
            yield
        except Exception as error:
            if not self._store.check([f"{self._name}/left"]):
                self._store.set(f"{self._name}/left", f"rank {self._rank} left {row}: {type(error).__name__}: {error}")
            raise

    def raise_failure(self) -> None:
        """Raises: StepError with the error that a rank left with, if one did. Wire: one request to the store."""
        if self._store.check([f"{self._name}/left"]):
            raise StepError(self._store.get(f"{self._name}/left").decode())

    def _absent(self, row: str, group: ProcessGroup) -> str:
        elsewhere = []
        for rank in dist.get_process_group_ranks(group):
            key = f"{self._name}/at/{rank}"
            at = self._store.get(key).decode() if self._store.check([key]) else "nothing yet"
            if at != row:
                elsewhere.append(f"rank {rank} (came last to {at})")
        waited = f"{row}: {', '.join(elsewhere) or 'no rank'} had not come"
        return (
            f"{waited} after {self._timeout_s:.0f} s at most. It has ended, waits for other ranks, or is slow: look at what "
            "it printed, or give the flow a longer timeout."
        )
