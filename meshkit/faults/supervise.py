"""Restarts in place (in-job restart, hot spares): a process beside each rank, which starts it anew when any rank has died.

A launcher that restarts a job starts every process from nothing: interpreter, imports, and on torchrun a rendezvous. Here the
process that the launcher started is the supervisor. It has imported all that the script imports, and forks the rank; when a
rank has died, all supervisors end theirs and fork again, in the time of a fork. That of process 0, the leader, decides.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from meshkit.errors import MeshError, PlanError
from meshkit.faults.crew import Crew, Restarts
from meshkit.faults.leader import BEAT_S, COME, LOST_S, Leader, exit_code, say
from meshkit.mesh.world import agree_on_start

T = TypeVar("T")
POLL_S = 0.1
MEMBERS_AT_A_POLL = 64  # more look less often: one store answers all
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
PARENT_DEATH_SIGNAL = 1  # of prctl(2)


def supervise(restarts: Restarts) -> None:
    """Returns in a forked process, a rank; the calling one watches over it, starts it anew, and ends with its exit code.

    Not after an error of what was given, exit code 2, nor when the launcher ends the job by SIGTERM. Each new process sees
    TORCHELASTIC_RESTART_COUNT one higher, as after a restart by torchrun.
    Wire: each supervisor writes a beat into the store of the job each second, and looks there every 0.1 s (more of 64
    processes: less often).
    Raises: PlanError where a device is in use already, which a fork cannot take along, and for more spares than processes.
    """
    if not restarts.times:
        return
    if torch.accelerator.is_available() and torch.get_device_module().is_initialized():
        raise PlanError(
            "run_main(restarts=...) forks, and this process uses a device already. Call it before anything is put on one: "
            "build model and data in main()."
        )
    if torch.get_num_threads() > 1:
        raise PlanError(
            f"run_main(restarts=...) forks, and of OpenMP's {torch.get_num_threads()} threads a fork has one, and waits for "
            "the others. Set OMP_NUM_THREADS=1 in the launch line."
        )
    if restarts.spares >= (processes := int(os.environ.get("WORLD_SIZE", "1"))):
        raise PlanError(f"{restarts.spares} spares of {processes} processes leave no rank. Launch more, or keep fewer.")
    supervisor = _Supervisor(restarts, processes)
    _KEPT.append(supervisor)
    supervisor.run()


# In the forked process, too: the end of a store's server waits for its thread, which no fork has.
_KEPT: list[_Supervisor] = []


class _Supervisor:
    """Over the rank of one process. They talk in the store of the job:

    beat/MEMBER          which process it is, and a number that grows
    crew                 who is which rank in this life, by the leader
    ended/LIFE/MEMBER    the exit status of a rank, and which of all it was by `order`; `events` counts them
    call, answer/CALL/MEMBER    the leader's roll call, after a death
    final                the exit code of the job, by the leader
    """

    def __init__(self, restarts: Restarts, processes: int) -> None:
        self._restarts, self._processes = restarts, processes
        self._member, self._token = int(os.environ.get("RANK", "0")), uuid.uuid4().hex[:12]
        self._first_count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._pid, self._told_to_end = 0, False
        self._crew = Crew(life=-1, members=(), tokens=())
        self._calls_answered, self._beats, self._next_beat = 0, 0, 0.0
        self._store = self._open_store()
        self._poll_s = POLL_S * max(1, processes / MEMBERS_AT_A_POLL)
        self._leader = Leader(restarts, processes, self._store, self._poll_s) if self._member == 0 else None

    def _open_store(self) -> Any:
        if self._processes == 1:
            return dist.HashStore()  # type: ignore[attr-defined]
        store, rank, size = next(rendezvous("env://", timeout=COME))
        # The store lives with the supervisor of process 0, or with torchrun: a rank only ever connects.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        name = "job"
        if dist.is_torchelastic_launched():  # its store may be that of an earlier start
            try:
                name = agree_on_start(store, rank, size, COME, place="meshkit/supervisors")
            except MeshError as error:
                say(f"MeshError (rank {rank}): {error}")
                os._exit(error.exit_code)
        return dist.PrefixStore(f"meshkit/supervised/{name}", store)  # type: ignore[attr-defined]

    def run(self) -> None:
        """Returns in the forked process alone."""
        signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # else, where the launcher ignores it, nobody learns how a rank ended
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._forward)
        while True:
            try:
                is_rank = self._turn()
            except (RuntimeError, TimeoutError) as error:
                # The store is gone: the job may be done, or this host is cut off, and others go on in its place.
                status = self._end_rank()
                if status != 0:
                    say(f"process {self._member} on {socket.gethostname()} lost the store of the job: {error}")
                os._exit(exit_code(1 if status is None else status))
            if is_rank:
                return
            time.sleep(self._poll_s)

    def _turn(self) -> bool:
        """One look at the rank and at the store; whether this is the forked process."""
        status = self._ended()
        if status is not None and self._told_to_end:
            os._exit(exit_code(status))
        told = _answer(lambda: self._ask(status))
        if told is None:
            return False  # not all have come
        crew, final = told
        if final:
            self._leave(int(final))
        return (new := Crew.decode(crew)).life > self._crew.life and self._begin(new)

    def _ask(self, status: int | None) -> tuple[str, str] | None:
        """(crew, final) of the store, which hears how this rank has ended, and that this process lives."""
        if status is not None:
            order = self._store.add("order", 1)
            self._store.set(f"ended/{self._crew.life}/{self._member}", f"{order} {status}")
            self._store.add("events", 1)
        if time.monotonic() > self._next_beat:
            self._next_beat, self._beats = time.monotonic() + BEAT_S, self._beats + 1
            self._store.set(f"beat/{self._member}", f"{self._token} {self._beats}")
        if self._leader is not None:
            self._leader.turn()
        if self._crew.life < 0 and not self._store.check(["crew"]):
            return None
        crew, call, final = (each.decode() for each in self._store.multi_get(["crew", "call", "final"]))
        if int(call) > self._calls_answered:
            self._calls_answered = int(call)
            self._store.set(f"answer/{call}/{self._member}", self._token)
        return crew, final

    def _leave(self, final: int) -> None:
        """With the job's exit code. A rank that still runs is left to what the launcher does where another one has ended."""
        if self._pid:
            _, status = os.waitpid(self._pid, 0)
            final = exit_code(os.waitstatus_to_exitcode(status)) or final
        if self._leader is not None:
            time.sleep(1 + 3 * self._poll_s)  # for the others to see it: the store may be in this process
        os._exit(final)

    def _begin(self, crew: Crew) -> bool:
        self._end_rank()
        self._crew = crew
        rank = crew.rank_of(self._member, self._token)
        if rank is None:
            return False
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(crew.members)),
            "TORCHELASTIC_RESTART_COUNT": str(self._first_count + crew.life),
        }
        self._pid = self._fork()
        return not self._pid

    # ---------------------------------------------------------------------------------------------------------- the rank

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
            elif self._told_to_end:
                os._exit(exit_code(-number))

    def _ended(self) -> int | None:
        """The exit status of the rank, once."""
        if not self._pid:
            return None
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            return None
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def _end_rank(self) -> int | None:
        """Its exit status; None where there is none."""
        if not self._pid:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)


def _answer(act: Callable[[], T]) -> T:
    """What the store says. Raises: TimeoutError where it says nothing: it may wait for ever on a host that is cut off."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(act())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LOST_S)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {LOST_S:.0f} s")
    return results[0]
