"""Preemption signals (SIGTERM, SIGUSR1): all ranks stop after the same step and save a checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

from meshkit.mesh import Mesh

_Handler = Callable[[int, FrameType | None], Any] | int | None


class SaveOnSignal:
    """Notice SIGTERM and SIGUSR1 while in the `with` block, instead of dying of them.

        with SaveOnSignal() as signals:
            for step in ...:
                ...
                if signals.should_stop(mesh):
                    checkpointer.save(step, run, optimizer)
                    break

    torchrun passes SIGTERM on to its workers and kills them 30 s later; ask Slurm for more with --signal=USR1@300.
    received: the name of the first signal that reached this rank, None so far.
    """

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        # The handler sets this and nothing else: Python runs it between two instructions of the main thread, wherever that
        # is, and the other ranks are elsewhere: it may neither save nor communicate.
        self.received: str | None = None
        self._signals = tuple(signals)
        self._before: dict[signal.Signals, _Handler] = {}

    def __enter__(self) -> SaveOnSignal:
        self._before = {number: signal.signal(number, self._receive) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None is a handler that was not set from Python and cannot be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def should_stop(self, mesh: Mesh) -> bool:
        """True on every rank of the mesh once a signal has reached any of them. Call it after each step.

        Wire: a message of 1 KiB up the tree of `mesh.host` and down again, which waits for no accelerator.
        """
        # Asked of all ranks at each step, since a signal reaches them at different steps: so they stop after the same one.
        # Between hosts and not over the mesh's group: an all-reduce of NCCL would wait for the step's kernels, and the host
        # with it.
        return mesh.host.all_reduce(self.received is not None, any)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
