"""Reward workers (process pool): several rewards at a time, each with a time limit; a worker that hangs is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

from meshkit.algos.rewards._score import Reward, Scores, Unscored, Value, attempt
from meshkit.algos.rollout import Rollout

START_S = 120.0
"""limit for a worker to start and import the reward; the time limit of an answer starts after that"""


class RewardPool:
    """`workers` processes that score answers with `reward`, which must be picklable: a function or object of a module.

    timeout_s: of each answer; a worker that takes longer, or dies, is replaced, while the others go on.
    Use it as a context manager, in a script with an `if __name__ == "__main__":` guard, since workers import the module of
    the reward.
    """

    def __init__(self, reward: Reward, *, workers: int = 4, timeout_s: float = 10.0) -> None:
        self._reward, self._timeout_s = reward, timeout_s
        # Not fork: this process may have threads of torch and gloo; a forked copy would keep their locks closed for ever.
        self._context = multiprocessing.get_context("forkserver")
        self._workers = [self._start() for _ in range(max(1, workers))]

    def score(self, answers: Sequence[Rollout]) -> Scores:
        """The reward of each answer, in order."""
        values: list[Value] = [Unscored(kind="raised", text="never tried")] * len(answers)
        # Reversed, and taken from the end: answers are given out in order.
        pending = list(range(len(answers)))[::-1]
        while pending or any(worker.answer is not None for worker in self._workers):
            for worker in self._workers:
                if pending and worker.answer is None:
                    worker.give(pending.pop(), answers)
            now = time.monotonic()
            busy = {w.connection: w for w in self._workers if w.answer is not None}
            # Waits for the first of: a reply, the death of a worker (its pipe ends), the next deadline.
            left_s = min(worker.deadline(self._timeout_s) for worker in busy.values()) - now
            for connection in wait(list(busy), timeout=max(0.0, left_s)):
                self._receive(busy[connection], values)  # type: ignore[index]  # wait gives back what it was given
            self._end_late(values)
        return Scores(values=tuple(values))

    def close(self) -> None:
        """Kill the workers."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> _Worker:
        connection, workers_end = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(workers_end, self._reward), daemon=True)
        process.start()
        workers_end.close()  # the worker has its own copy; with ours open, its death would not end the pipe
        return _Worker(process=process, connection=connection)

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = self._start()

    def _receive(self, worker: _Worker, values: list[Value]) -> None:
        assert worker.answer is not None
        try:
            word, value = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            # The pipe ends a moment before the process does; its exit code comes with the second.
            worker.process.join(1)
            values[worker.answer] = Unscored(
                kind="raised", text=f"the worker died with exit code {worker.process.exitcode}"
            )
            self._replace(worker)
            return
        if word == "began":
            worker.began = time.monotonic()
        else:
            values[worker.answer], worker.answer = value, None

    def _end_late(self, values: list[Value]) -> None:
        now = time.monotonic()
        for worker in [w for w in self._workers if w.answer is not None and now >= w.deadline(self._timeout_s)]:
            limit = START_S if worker.began is None else self._timeout_s
            values[worker.answer] = Unscored(kind="timed out", text=f"no score within {limit} s")  # type: ignore[index]  # wait gives back what it was given
            self._replace(worker)


@dataclass(eq=False)
class _Worker:
    process: Any
    connection: Connection
    answer: int | None = None  # index of the answer it works on
    given: float = 0.0
    began: float | None = None

    def give(self, index: int, answers: Sequence[Rollout]) -> None:
        self.answer, self.given, self.began = index, time.monotonic(), None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: `_receive` finds the end of its pipe
            self.connection.send(answers[index])

    def deadline(self, timeout_s: float) -> float:
        return self.given + START_S if self.began is None else self.began + timeout_s

    def kill(self) -> None:
        # SIGKILL, not SIGTERM: a reward that hangs in C runs no handler.
        self.process.kill()
        self.process.join(5)
        self.connection.close()


def _serve(connection: Connection, reward: Reward) -> None:
    while True:
        try:
            answer = connection.recv()
        except EOFError:
            return
        connection.send(("began", None))  # the reward is imported: the time limit of the answer starts
        connection.send(("done", attempt(answer, reward)))  # numbers or a text: nothing that cannot be pickled
