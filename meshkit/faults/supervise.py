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
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from meshkit.errors import MeshError, PlanError
from meshkit.faults.crew import Crew, Restarts, next_members
from meshkit.mesh.world import agree_on_start

T = TypeVar("T")
POLL_S = 0.1
MEMBERS_AT_A_POLL = 64  # more look less often: one store answers all
BEAT_S = 1.0
ROLL_CALL_S = 5.0  # after a rank has died, for the other supervisors to answer: who does not is lost
LOST_S = 30.0  # without a beat, while no rank has died, or without an answer of the store
COME = timedelta(minutes=10)  # for all supervisors, at first
CAUSE_S = 2.0  # for the supervisor of a dead rank to say so, before what another rank met is taken for the cause
WRONG_INPUT = 2  # exit code of what another start would not change
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
        self._leader = _Leader(restarts, processes, self._store, self._poll_s) if self._member == 0 else None

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
                _say(f"MeshError (rank {rank}): {error}")
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
                    _say(f"process {self._member} on {socket.gethostname()} lost the store of the job: {error}")
                os._exit(_exit_code(1 if status is None else status))
            if is_rank:
                return
            time.sleep(self._poll_s)

    def _turn(self) -> bool:
        """One look at the rank and at the store; whether this is the forked process."""
        status = self._ended()
        if status is not None and self._told_to_end:
            os._exit(_exit_code(status))
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
            final = _exit_code(os.waitstatus_to_exitcode(status)) or final
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
                os._exit(_exit_code(-number))

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


class _Leader:
    """Beside the supervisor of process 0: sees who has died, and says who is which rank in the next life."""

    def __init__(self, restarts: Restarts, processes: int, store: Any, poll_s: float) -> None:
        self._restarts, self._processes, self._store, self._poll_s = restarts, processes, store, poll_s
        self._ranks = processes - restarts.spares
        self._crew = Crew(life=-1, members=(), tokens=())
        self._beats: dict[int, tuple[str, float]] = {}  # of each member, the last beat and when it came
        self._next_look, self._began = 0.0, time.monotonic()
        self._events, self._calls, self._is_final = 0, 0, False
        self._code = 1  # of the last rank that ended with an error

    def turn(self) -> None:
        if self._is_final:
            return
        now = time.monotonic()
        if now > self._next_look:
            self._next_look = now + BEAT_S / 2
            self._look(now)
        if self._crew.life < 0:
            self._wait_for_all(now)
        elif (reason := self._reason(now)) is not None:
            self._begin_again(reason)

    def _look(self, now: float) -> None:
        """At all beats."""
        keys = {member: f"beat/{member}" for member in range(self._processes)}
        there = {member: key for member, key in keys.items() if member in self._beats or self._store.check([key])}
        for member, beat in zip(there, self._store.multi_get([*there.values()]) if there else [], strict=True):
            if self._beats.get(member, ("", 0.0))[0] != beat.decode():
                self._beats[member] = beat.decode(), now

    def _token(self, member: int) -> str:
        return self._beats[member][0].split()[0]

    def _wait_for_all(self, now: float) -> None:
        ranks = range(self._ranks)
        if missing := [rank for rank in ranks if rank not in self._beats]:
            if now - self._began > COME.total_seconds():
                self._end(WRONG_INPUT, f"ranks {missing[:8]} have not come within {COME.total_seconds():.0f} s")
            return
        self._store.set("call", "0")
        self._store.set("final", "")
        self._publish(tuple(ranks))

    def _publish(self, members: tuple[int, ...]) -> None:
        tokens = tuple(map(self._token, members))
        self._crew = Crew(life=self._crew.life + 1, members=members, tokens=tokens)
        self._store.set("crew", self._crew.encode())

    # ----------------------------------------------------------------------------------------------------- deaths, births

    def _reason(self, now: float) -> str | None:
        """Why all should start anew; None while all is well. Ends the job where it is done, or cannot be mended."""
        if (events := self._store.add("events", 0)) != self._events:
            self._events = events
            if (reason := self._read_ends()) is not None:
                return reason
        for rank, (member, token) in enumerate(zip(self._crew.members, self._crew.tokens, strict=True)):
            if self._token(member) != token:
                return f"rank {rank} was lost, and its process started anew"
            if now - self._beats[member][1] > LOST_S:
                return f"rank {rank} has not been heard of for {LOST_S:.0f} s"
        alive = [member for member, (_, at) in self._beats.items() if now - at < ROLL_CALL_S]
        more = next_members(self._crew.members, alive, ranks=self._ranks, multiple=self._restarts.multiple)
        if more is not None and len(more) > len(self._crew.members):
            return f"{len(more)} ranks in the place of {len(self._crew.members)}"
        return None

    def _read_ends(self) -> str | None:
        ends = self._ends()
        if all(status == 0 for status in ends.values()):
            if len(ends) == len(self._crew.members):
                self._end(0)
            return None
        until = time.monotonic() + CAUSE_S
        while {*ends.values()} <= {0, WRONG_INPUT} and time.monotonic() < until:
            time.sleep(self._poll_s)  # it may be what that rank met because another one died
            ends = self._ends()
        first = next((rank for rank, status in ends.items() if status not in (0, WRONG_INPUT)), None)
        if first is None:
            self._end(WRONG_INPUT)
            return None
        status = ends[first]
        self._code = _exit_code(status)
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit code {status}"
        return f"rank {first} ended {how}"

    def _ends(self) -> dict[int, int]:
        """The exit status of each rank that has ended, the first one first."""
        keys = {rank: f"ended/{self._crew.life}/{member}" for rank, member in enumerate(self._crew.members)}
        told = {rank: self._store.get(key).decode().split() for rank, key in keys.items() if self._store.check([key])}
        return {rank: int(status) for rank, (_, status) in sorted(told.items(), key=lambda end: int(end[1][0]))}

    def _begin_again(self, reason: str) -> None:
        life = self._crew.life + 1
        alive = self._call_roll()
        members = next_members(self._crew.members, alive, ranks=self._ranks, multiple=self._restarts.multiple)
        if life > self._restarts.times:
            self._end(self._code, f"{reason}: the job ends, it has started anew {self._restarts.times} times")
        elif members is None:
            few = f"{len(alive)} of {self._ranks} processes are left"
            self._end(self._code, f"{reason}: the job ends, {few}")
        else:
            change = "" if len(members) == len(self._crew.members) else f" as {len(members)}"
            _say(f"{reason}: all ranks start anew{change}, {life} of {self._restarts.times}.")
            self._publish(members)

    def _call_roll(self) -> list[int]:
        """Who lives: members that answer."""
        self._calls += 1
        self._store.set("call", str(self._calls))
        members = [*self._beats]
        keys = {member: f"answer/{self._calls}/{member}" for member in members if member != 0}
        until = time.monotonic() + ROLL_CALL_S
        answered: set[int] = {0}
        while len(answered) < len(members) and time.monotonic() < until:
            answered |= {member for member, key in keys.items() if member not in answered and self._store.check([key])}
            time.sleep(self._poll_s / 2)
        self._look(time.monotonic())
        return sorted(answered)

    def _end(self, code: int, reason: str = "") -> None:
        if reason:
            _say(f"{reason}.")
        self._is_final = True
        if not self._store.check(["crew"]):  # nobody has begun
            for key, value in (("call", "0"), ("crew", self._crew.encode())):
                self._store.set(key, value)
        self._store.set("final", str(code))


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


def _exit_code(status: int) -> int:
    """As a shell says it: 128 and the number of the signal."""
    return status if status >= 0 else 128 - status


def _say(text: str) -> None:
    print(f"\n{text}", file=sys.stderr, flush=True)
