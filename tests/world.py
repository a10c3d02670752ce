"""Worlds of ranks for tests: the one file that starts processes.

`run_ranks` gives a test a fresh world; `pool` gives it a warm one that many examples share. Ranks are forked from a
server that has already imported torch (0.1 s instead of 10 s a world), talk over gloo on loopback, run one thread each,
and are killed when one of them raises, when all of them are stuck, when time is up, or when pytest is gone: so no test can
hang, and none leaves a rank behind.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import multiprocessing as mp
import os
import pickle
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preload"])
STARTUP_S = 60.0
LOOK_S = 1.0
STUCK_LOOKS = 6  # see [Note: stuck ranks]
STACKS = signal.SIGUSR2  # a rank that gets it writes down where its threads stand, even one that hangs in native code
NATIVE = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)
# What was run a second time, since a rank ended in native code: once in some thousand runs gloo's own thread crashes in
# malloc. The suite prints them. A second crash is a failure.
CRASHES: list[str] = []
# What ranks never answered, by what was asked of them. Hypothesis runs an example that failed a second time before it
# shows it, and pytest may come to the same cell again: that would take as long as the first time, and end the same way.
UNANSWERED: dict[bytes, RankError] = {}


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time. The text carries its traceback.

    crashed: it ended in native code. unanswered: ranks were stuck or late.
    """

    crashed = False
    unanswered = False


def fork(target: Callable[..., Any], *args: Any, daemon: bool = False, context: Any = CONTEXT) -> Any:
    """A process, started, in which torch is imported. It ends with this one, even if this one is killed."""
    ends, life = context.Pipe(
        duplex=False
    )  # nothing is sent; of each process its own, since the kernel tells one of it
    process = context.Process(target=_owned, args=(ends, target, args), daemon=daemon)
    process.start()
    ends.close()
    process.life = life  # type: ignore[attr-defined]  # open as long as somebody knows the process
    return process


class World:
    """`size` processes with an initialised process group, waiting for functions to run."""

    def __init__(self, size: int, context: Any = CONTEXT) -> None:
        self.size, self.runs, self._context = size, 0, context
        self._folder = tempfile.mkdtemp(prefix="meshkit-world-")
        # As torchrun has it. Who waits for a key is told when it comes; of a file he would ask every 10 ms, and ranks wait
        # for keys in each group that they make, and in each module of a first step.
        self._store: TCPStore | None = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            here, there = context.Pipe()
            process = fork(_serve, rank, size, self._store.port, self._folder, there, daemon=True, context=context)
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        self._collect(STARTUP_S, "starting")

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
        """`function(*args)` on every rank; the results in order of rank. The function is named by its module."""
        if UNANSWERED and (before := UNANSWERED.get(self._asked(function, args))):
            raise before
        try:
            return self._run(function, *args, timeout_s=timeout_s)
        except RankError as error:
            if error.unanswered:
                UNANSWERED[self._asked(function, args)] = error
            if not error.crashed:
                raise
            CRASHES.append(f"{function.__name__} on {self.size} ranks: {error}")
        fresh = World(self.size, self._context)  # this one is dead
        try:
            return fresh._run(function, *args, timeout_s=timeout_s)
        finally:
            fresh.kill()

    def _asked(self, function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
        return pickle.dumps((self.size, function, args))

    def _run(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        self.runs += 1
        for connection in self._connections:
            connection.send((function, args))
        return self._collect(timeout_s, function.__name__)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(5)
        for connection in self._connections:
            connection.close()
        self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, timeout_s: float, what: str) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        waiting = dict(zip(self._connections, range(self.size), strict=True))
        results: list[Any] = [None] * self.size
        failures: dict[int, str] = {}
        stuck = Stuck()
        why = f"within {timeout_s} s"
        while waiting:
            # After a failure the others get a moment to fail too: the first to arrive is not always the cause.
            left = deadline - time.monotonic() if not failures else 1.0
            ready = wait(list(waiting), timeout=max(0.0, min(left, LOOK_S)))
            if not ready:
                if left <= LOOK_S:
                    break
                if stuck.look([self._processes[rank].pid for rank in waiting.values()]):
                    why = f"and they are stuck: for {STUCK_LOOKS * LOOK_S:.0f} s none of their threads has run"
                    break
                continue
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    ok, value = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    ok, value = False, self._death(rank)
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = value
        if failures or waiting:
            silent = sorted(waiting.values())
            stacks = self._stacks(silent) if not failures else {}
            self.kill()
            reports = [f"rank {rank} of {self.size} in {what}:\n{text}" for rank, text in sorted(failures.items())]
            if waiting:
                reports.append(f"no answer from rank {silent} in {what} {why}")
            reports += [f"rank {rank} stands at (most recent call first):\n{text}" for rank, text in stacks.items()]
            error = RankError("\n".join(reports))
            error.unanswered = not failures
            error.crashed = any(self._processes[rank].exitcode in NATIVE for rank in failures)
            raise error
        return results

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """What the threads of these ranks are in, of those that live."""
        files = {rank: Path(self._folder, f"stacks-{rank}") for rank in ranks if self._processes[rank].is_alive()}
        files = {rank: file for rank, file in files.items() if file.exists()}  # else it cannot take the signal yet
        for rank in files:
            os.kill(self._processes[rank].pid, STACKS)
        time.sleep(0.5 if files else 0.0)
        return {rank: file.read_text() for rank, file in files.items()}

    def _death(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(5)
        code = process.exitcode
        how = f"ended by signal {-code}" if code is not None and code < 0 else f"ended with {code}"
        stacks = Path(self._folder, f"stacks-{rank}")
        return f"the process was {how}\n{stacks.read_text() if stacks.exists() else ''}"


class Stuck:
    """Whether processes have been found stuck so many times in a row: see [Note: stuck ranks]."""

    def __init__(self) -> None:
        self._before: dict[int, int] | None = None
        self._looks = 0

    def look(self, processes: list[int]) -> bool:
        now = _switches(processes)
        self._looks = self._looks + 1 if now is not None and now == self._before else 0
        self._before = now
        return self._looks >= STUCK_LOOKS


# [Note: stuck ranks]
# Ranks of which one lacks a message wait for each other until time is up, which is minutes. They are told from slow ones by
# their threads: each sleeps, and sleeps still the same sleep (the kernel counts how often a thread gave up its processor).
# A slow machine does not look so: there a thread that could go on is ready to run, or reads a disk, and does not sleep. So
# six seconds are plenty, of which each is seen and not measured: a pause of the whole machine counts as one look.
# Gloo's own thread does not count. It wakes a hundred times a second, and spins once a buffer is gone that a message was to
# come into. On torch 2.11 it has no name, so that time must be up there. Ranks that wait for a child process are not stuck;
# those that sleep on purpose, for longer than this, give a sleep in pieces.
GLOO = "gloo_tcp_loop"


def _switches(processes: list[int]) -> dict[int, int] | None:
    """Of each thread how often it went to sleep; None if one of them does not sleep, or this cannot be known."""
    found: dict[int, int] = {}
    try:
        for process in processes:
            for task in Path(f"/proc/{process}/task").iterdir():
                status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                if status["Name"].strip() == GLOO:
                    continue
                if status["State"].split()[0] != "S" or (task / "children").read_text():
                    return None
                found[int(task.name)] = int(status["voluntary_ctxt_switches"])
    except (OSError, KeyError):  # a thread has ended, or this is another system
        return None
    return found or None


def run_ranks(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """Run in a world made for this call and ended with it."""
    world = World(size)
    try:
        return world.run(function, *args, timeout_s=timeout_s)
    finally:
        world.kill()


_pools: dict[int, World] = {}  # in the order of their last use
RUNS_OF_A_WORLD = 200  # process groups of old meshes stay
WORLDS = 4  # whose ranks take some 200 MB each


def pool(size: int) -> World:
    """The warm world of this size; a new one after a failure, and after many runs.

    State that a test leaves behind is the test's fault.
    """
    for old in [old for old, world in _pools.items() if not world.alive or world.runs >= RUNS_OF_A_WORLD]:
        _pools.pop(old).kill()
    world = _pools.pop(size, None)
    if world is None and len(_pools) == WORLDS:
        _pools.pop(next(iter(_pools))).kill()
    _pools[size] = world or World(size)
    return _pools[size]


@atexit.register
def _end_pools() -> None:
    for world in _pools.values():
        with contextlib.suppress(OSError):
            world.kill()


def _serve(rank: int, size: int, port: int, folder: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    unnamed = os.path.join(folder, f"stacks-{rank}-")
    stacks = open(unnamed, "w")  # noqa: SIM115  # as long as the rank
    faulthandler.enable(stacks)
    faulthandler.register(STACKS, stacks)
    os.rename(unnamed, unnamed.removesuffix("-"))  # it is there once the signal may come
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    _share_one_device()
    try:
        store = TCPStore("127.0.0.1", port, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        connection.send((True, None))
        while True:
            function, args = connection.recv()
            connection.send((True, function(*args)))
    except EOFError:
        pass  # the test process is gone
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send((False, traceback.format_exc()))
        time.sleep(3)  # keep sockets open until the others have reported; the parent kills sooner


def _owned(life: Connection, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Let the kernel kill this process once nobody holds the other end: it does so whatever the process is in.

    A thread that looks after it would wait for the interpreter's lock, which native code may hold; and the parent, whose
    death a child can be told of, is the server that forks and not pytest.
    """
    pipe = life.fileno()
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)  # what it sends when a pipe has news; the default would be SIGIO
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(pipe, 0)
    if closed.poll(0):  # before the kernel was asked
        os._exit(1)
    target(*args)


def _share_one_device() -> None:
    """Let one thread of this rank serve all of its process groups.

    Each would make a device of its own, whose thread wakes a hundred times a second: twenty meshes have two hundred, and
    with eight ranks on two cores those took half of the processor's time.
    """
    from torch.distributed import ProcessGroupGloo

    init, device = ProcessGroupGloo.__init__, ProcessGroupGloo.create_default_device()

    def with_device(self: Any, store: Any, rank: int, size: int, *, timeout: Any, **_: Any) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], timeout
        init(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = with_device
