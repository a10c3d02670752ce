"""Worlds of ranks for tests: the one file that starts processes.

`run_ranks` gives a test a fresh world; `pool` gives it a warm one that many examples share. Ranks are forked from a
server that has already imported torch (0.1 s instead of 10 s a world), talk over gloo on loopback, run one thread each,
and are killed when one of them raises or time is up, so no test can hang.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preload"])
STARTUP_S = 60.0


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time. The text carries its traceback."""


class World:
    """`size` processes with an initialised process group, waiting for functions to run."""

    def __init__(self, size: int) -> None:
        self.size, self.runs = size, 0
        store = os.path.join(tempfile.mkdtemp(prefix="meshkit-world-"), "store")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, size, store, there), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        self._collect(STARTUP_S, "starting")

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """`function(*args)` on every rank; the results in order of rank. The function is named by its module."""
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

    def _collect(self, timeout_s: float, what: str) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        waiting = dict(zip(self._connections, range(self.size), strict=True))
        results: list[Any] = [None] * self.size
        failures: dict[int, str] = {}
        while waiting:
            # After a failure the others get a moment to fail too: the first to arrive is not always the cause.
            left = deadline - time.monotonic() if not failures else 1.0
            ready = wait(list(waiting), timeout=max(0.0, left))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    ok, value = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    ok, value = False, "the process died"
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = value
        if failures or waiting:
            self.kill()
            reports = [f"rank {rank} of {self.size} in {what}:\n{text}" for rank, text in sorted(failures.items())]
            if waiting:
                reports.append(f"no answer from rank {sorted(waiting.values())} in {what} within {timeout_s} s")
            raise RankError("\n".join(reports))
        return results


def run_ranks(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run in a world made for this call and ended with it."""
    world = World(size)
    try:
        return world.run(function, *args, timeout_s=timeout_s)
    finally:
        world.kill()


_pools: dict[int, World] = {}
RUNS_OF_A_WORLD = 60  # process groups of old meshes stay, and the threads of each poll


def pool(size: int) -> World:
    """The warm world of this size; a new one after a failure, and after many runs. At most one is alive at a time.

    State that a test leaves behind is the test's fault.
    """
    world = _pools.get(size)
    if world is None or not world.alive or world.runs >= RUNS_OF_A_WORLD:
        for other in _pools.values():
            other.kill()
        _pools.clear()
        world = _pools[size] = World(size)
    return world


@atexit.register
def _end_pools() -> None:
    for world in _pools.values():
        with contextlib.suppress(OSError):
            world.kill()


def _serve(rank: int, size: int, store_path: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.FileStore(store_path, size)
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
