"""Worker processes (process pool): calls of one function, several at a time, with a time limit; one that hangs is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

START_S = 120.0
"""limit for a worker to start and import what it is called with; the time limit of a call starts after that"""
END_S = 5.0
"""limit for a killed worker to end"""

_Worker = tuple[Any, Connection]
"""its process, and our end of its pipe"""


class WorkerDied(Exception):
    """The process ended within a call."""


class CallFailed(Exception):
    """What the call raised, as text."""


class Workers:
    """`count` processes that call `function`, which must be picklable: a function or object of a module.

    timeout_s: of each call; a worker that takes longer, or dies, is replaced, while the others go on.
    """

    def __init__(self, function: Callable[[Any], Any], *, count: int, timeout_s: float) -> None:
        self._function, self._timeout_s = function, timeout_s
        # Not fork: this process may have threads of torch and gloo; a forked copy would keep their locks closed for ever.
        self._context = multiprocessing.get_context("forkserver")
        self._calls: queue.Queue[tuple[Future[Any], Any]] = queue.Queue()
        self._lock = threading.Lock()  # of the two below
        self._closed = False
        # Here, not in their threads: an error of the start, as of a script without a __main__ guard, is the caller's.
        self._workers: list[_Worker | None] = [self._start() for _ in range(max(1, count))]
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), daemon=True) for index in range(len(self._workers))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, argument: object) -> Future[Any]:
        """function(argument), by the first worker that is free. The future raises TimeoutError, WorkerDied or CallFailed;
        CancelledError where no worker had begun when they were closed."""
        future: Future[Any] = Future()
        self._calls.put((future, argument))
        return future

    def close(self) -> None:
        """Kill the workers."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                if worker is not None:
                    worker[0].kill()
        for _ in self._threads:
            self._calls.put((Future(), None))  # wakes a thread, which sees that it is over
        for thread in self._threads:
            thread.join(END_S)

    def _start(self) -> _Worker:
        connection, workers_end = self._context.Pipe()
        process = self._context.Process(target=_serve_calls, args=(workers_end, self._function), daemon=True)
        process.start()
        workers_end.close()  # the worker has its own copy; with ours open, its death would not end the pipe
        return process, connection

    def _serve(self, index: int) -> None:
        """A thread for each worker: it waits for its replies while the caller does something else, and alone ends its pipe,
        since a descriptor that two threads close may be another file's by then."""
        worker = self._workers[index]
        while True:
            future, argument = self._calls.get()
            try:
                with self._lock:
                    if self._closed:
                        future.cancel()
                        break
                    if worker is None:
                        worker = self._workers[index] = self._start()
                future.set_result(self._called(*worker, argument))
            except CallFailed as error:
                future.set_exception(error)
            except BaseException as error:
                with self._lock:
                    broken, worker = worker, None
                    self._workers[index] = None
                if broken is not None:
                    _kill(*broken)
                future.set_exception(error)
        if worker is not None:
            _kill(*worker)

    def _called(self, process: Any, connection: Connection, argument: object) -> Any:
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: `recv` finds the end of its pipe
                connection.send(argument)
            for limit_s in (START_S, self._timeout_s):
                if not connection.poll(limit_s):
                    raise TimeoutError(f"within {limit_s} s")
                word, value = connection.recv()
        except (EOFError, ConnectionResetError):
            # The pipe ends a moment before the process does; its exit code comes with the second.
            process.join(1)
            raise WorkerDied(f"the worker died with exit code {process.exitcode}") from None
        if word == "raised":
            raise CallFailed(value)
        return value


def _kill(process: Any, connection: Connection) -> None:
    # SIGKILL, not SIGTERM: a call that hangs in C runs no handler.
    process.kill()
    process.join(END_S)
    connection.close()
    with contextlib.suppress(ValueError):  # it has not ended yet
        process.close()


def _serve_calls(connection: Connection, function: Callable[[Any], Any]) -> None:
    while True:
        try:
            argument = connection.recv()
        except EOFError:
            return
        connection.send(("began", None))  # what it needs is imported: the time limit of the call starts
        try:
            reply = ("done", function(argument))
        except (Exception, SystemExit) as error:
            reply = ("raised", f"{type(error).__name__}: {error}")
        connection.send(reply)
