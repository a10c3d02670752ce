"""Restarts in place (in-job restart, hot restart): a process beside each rank, which starts it anew when any rank has died.

A launcher that restarts a job starts every process from nothing: interpreter, imports, and on torchrun a rendezvous. Here the
process that the launcher started is the supervisor. It has imported all that the script imports, and forks the rank; when a
rank has died, all supervisors end theirs and fork again, in the time of a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
import warnings
from datetime import timedelta
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from meshkit.errors import MeshError, PlanError
from meshkit.mesh.world import agree_on_start

POLL_S = 0.05
RANKS_AT_A_POLL = 64  # a larger world looks less often: one store answers all
WRONG_INPUT = 2  # exit code of what another start would not change
CAUSE_S = 2.0  # for the supervisor of a dead rank to say so, before what another rank met is taken for the cause
TIMEOUT = timedelta(minutes=10)  # for all supervisors to come
ENDED = timedelta(seconds=60)  # for all ranks to have ended
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
PARENT_DEATH_SIGNAL = 1  # of prctl(2)
Verdict = Literal["again", "final"]


def supervise(restarts: int) -> None:
    """Returns in a forked process, the rank; the calling one watches over it, starts it anew, and ends with its exit code.

    restarts: how often ranks are started anew. Not after an error of what was given, exit code 2. Each new process sees
    TORCHELASTIC_RESTART_COUNT one higher, as after a restart by torchrun.
    Raises: PlanError where a device is in use already, which a fork cannot take along.
    """
    if restarts < 1:
        return
    if torch.accelerator.is_available() and torch.get_device_module().is_initialized():
        raise PlanError(
            "run_main(restarts=...) forks, and this process uses a device already. Call it before anything is put on one: "
            "build model and data in main()."
        )
    _Supervisor(restarts).run()


class _Supervisor:
    """Over one rank, with those of the other ranks: they talk in the store of the job."""

    def __init__(self, restarts: int) -> None:
        self._restarts, self._life = restarts, 0
        self._rank, self._ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._pid, self._told_to_end = 0, False
        self._store = self._open_store()
        self._poll_s = POLL_S * max(1, self._ranks / RANKS_AT_A_POLL)

    def _open_store(self) -> Any:
        if self._ranks == 1:
            return dist.HashStore()  # type: ignore[attr-defined]
        store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
        # The store lives with the supervisor of rank 0, or with torchrun: a rank only ever connects.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        try:
            start = agree_on_start(store, rank, size, TIMEOUT, place="meshkit/supervisors")
        except MeshError as error:
            print(f"MeshError (rank {rank}): {error}", file=sys.stderr, flush=True)
            os._exit(error.exit_code)
        return dist.PrefixStore(f"meshkit/supervised/{start}", store)  # type: ignore[attr-defined]

    def run(self) -> None:
        """Returns in the forked process alone."""
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._forward)
        first = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        while True:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(first + self._life)
            self._pid = self._fork()
            if self._pid == 0:
                return
            status = self._watch()
            if status is not None:
                os._exit(status)
            self._life += 1

    def _fork(self) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            # The threads that Python warns of are those of the store's server, of which the fork needs nothing.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            return pid
        for number in FORWARDED:
            if signal.getsignal(number) == self._forward:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died between the two
            os._exit(1)
        return 0

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._told_to_end |= number in (signal.SIGTERM, signal.SIGINT)
        with contextlib.suppress(ProcessLookupError):
            if self._pid:
                os.kill(self._pid, number)

    # ------------------------------------------------------------------------------------------------------ of all ranks

    def _watch(self) -> int | None:
        """Until this rank and all others are done, or one has died: the exit code, or None to start anew."""
        status: int | None = None  # of this rank, once it has ended
        try:
            while True:
                if status is None and (status := self._ended()) is not None:
                    if status == 0:
                        self._store.add(f"{self._life}/done", 1)
                    elif self._told_to_end or not self._starts_again(status):
                        return _exit_code(status)
                if (verdict := self._verdict()) is not None:
                    if verdict == "again":
                        return self._begin_again(status)
                    return self._wait_for_rank() if status is None else status
                if status == 0 and self._store.add(f"{self._life}/done", 0) == self._ranks:
                    if self._rank == 0:
                        time.sleep(3 * self._poll_s)  # for the others to see it: the store may be in this process
                    return 0
                time.sleep(self._poll_s)
        except RuntimeError:  # the store is gone, and with it who could say when to start anew
            return self._wait_for_rank() if status is None else _exit_code(status)

    def _ended(self) -> int | None:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def _wait_for_rank(self) -> int:
        """As without a supervisor: what one rank was given wrong, the others learn from it, or from the launcher."""
        _, status = os.waitpid(self._pid, 0)
        return _exit_code(os.waitstatus_to_exitcode(status))

    def _starts_again(self, status: int) -> bool:
        """Say why this rank has ended, once in the job; whether all start anew."""
        if status == WRONG_INPUT:  # unless it is what this rank met because another one died
            until = time.monotonic() + CAUSE_S
            while self._verdict() is None and time.monotonic() < until:
                time.sleep(self._poll_s)
        verdict: Verdict = "final" if status == WRONG_INPUT or self._life == self._restarts else "again"
        told: str = self._store.compare_set(f"{self._life}/verdict", "", f"{verdict} {self._rank}").decode()
        if told == f"{verdict} {self._rank}":
            name = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit code {status}"
            after = (
                f"all ranks start anew, {self._life + 1} of {self._restarts}" if verdict == "again" else "the job ends"
            )
            where = f"rank {self._rank} on {socket.gethostname()}"
            print(f"\n{where} ended {name}: {after}.", file=sys.stderr, flush=True)
        return told.startswith("again")

    def _verdict(self) -> Verdict | None:
        """Of the first rank of this life that has died."""
        key = f"{self._life}/verdict"
        if not self._store.check([key]):
            return None
        return "again" if self._store.get(key).decode().startswith("again") else "final"

    def _begin_again(self, status: int | None) -> int | None:
        """End this rank, and wait for all others to have ended: what they hold of ports and files is free then."""
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._pid = 0
        ended = f"{self._life}/ended"
        self._store.add(ended, 1)
        until = time.monotonic() + ENDED.total_seconds()
        while self._store.add(ended, 0) < self._ranks:
            if time.monotonic() > until:
                print(
                    f"rank {self._rank}: only {self._store.add(ended, 0)} of {self._ranks} supervisors have answered within "
                    f"{ENDED.total_seconds():.0f} s. A host has ended, or the network to it: the job ends.",
                    file=sys.stderr,
                    flush=True,
                )
                return 1
            time.sleep(self._poll_s)
        return None


def _exit_code(status: int) -> int:
    """As a shell says it: 128 and the number of the signal."""
    return status if status >= 0 else 128 - status
