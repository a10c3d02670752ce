"""Rewards in processes of their own: several at a time, and one that does not come back is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

from meshkit.algos.rewards._score import Reward, Scores, Unscored, attempt, checked
from meshkit.algos.rollout import Rollout

START_S = 120.0
"""for a worker to import the reward; its time limit starts after that"""


class RewardPool:
    """`workers` processes that score answers with `reward`, which must be picklable: a function or object of a module.

    timeout_s: of each answer; a worker that takes longer is killed and replaced, so are those that die. The others go on.
    Use it as a context manager, in a program that guards its main: workers import the module that the reward is from.
    """

    def __init__(self, reward: Reward, *, workers: int = 4, timeout_s: float = 10.0) -> None:
        self._reward, self._timeout_s = reward, timeout_s
        # Not fork: this process may have threads of torch and gloo, whose locks a copy would never see opened.
        self._context = multiprocessing.get_context("forkserver")
        self._workers = [self._start() for _ in range(max(1, workers))]

    def score(self, answers: Sequence[Rollout]) -> Scores:
        """The reward of each answer, in order."""
        values: list[Any] = [Unscored(kind="raised", text="never tried")] * len(answers)
        waiting = list(range(len(answers)))[::-1]
        while waiting or any(worker.answer is not None for worker in self._workers):
            for worker in self._workers:
                if waiting and worker.answer is None:
                    worker.give(waiting.pop(), answers)
            now = time.monotonic()
            busy = {w.connection: w for w in self._workers if w.answer is not None}
            next_s = min(worker.deadline(self._timeout_s) for worker in busy.values()) - now
            for connection in wait(list(busy), timeout=max(0.0, next_s)):
                self._receive(busy[connection], values)  # type: ignore[index]  # wait gives back what it was given
            self._end_late(values)
        return Scores(values=tuple(checked(answer, value) for answer, value in zip(answers, values, strict=True)))

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
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, self._reward), daemon=True)
        process.start()
        there.close()
        return _Worker(process=process, connection=here)

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = self._start()

    def _receive(self, worker: _Worker, values: list[Any]) -> None:
        assert worker.answer is not None
        try:
            word, found = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(1)
            values[worker.answer] = Unscored(
                kind="raised", text=f"the worker died with exit code {worker.process.exitcode}"
            )
            self._replace(worker)
            return
        if word == "began":
            worker.began = time.monotonic()
        else:
            values[worker.answer], worker.answer = found, None

    def _end_late(self, values: list[Any]) -> None:
        now = time.monotonic()
        for worker in [w for w in self._workers if w.answer is not None and now >= w.deadline(self._timeout_s)]:
            limit = START_S if worker.began is None else self._timeout_s
            values[worker.answer] = Unscored(kind="timed out", text=f"no score within {limit} s")  # type: ignore[index]  # wait gives back what it was given
            self._replace(worker)


@dataclass(eq=False)
class _Worker:
    process: Any
    connection: Connection
    answer: int | None = None  # what it works on
    given: float = 0.0
    began: float | None = None

    def give(self, index: int, answers: Sequence[Rollout]) -> None:
        self.answer, self.given, self.began = index, time.monotonic(), None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: `_receive` finds the end of its pipe
            self.connection.send(answers[index])

    def deadline(self, timeout_s: float) -> float:
        return self.given + START_S if self.began is None else self.began + timeout_s

    def kill(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.connection.close()


def _serve(connection: Connection, reward: Reward) -> None:
    while True:
        try:
            answer = connection.recv()
        except EOFError:
            return
        connection.send(("began", None))  # it is awake: from now on time counts
        connection.send(("found", attempt(answer, reward)))
