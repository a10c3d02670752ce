"""Processes that trace beforehand what a search is about to ask for; forked, they know what was read and traced so far."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from meshkit.errors import PlanError

Found = Mapping[Hashable, Any]
LONGEST_S = 300.0  # that a search waits for one answer: a trace takes seconds


@dataclass(frozen=True)
class Task:
    """key: of what is asked for, a method and what it depends on; arguments: of the method."""

    key: Hashable
    method: str
    arguments: tuple[Any, ...] = field(compare=False)


@dataclass(eq=False)
class _Helper:
    """keys: of what it was asked for and has not answered, in the order of its answers."""

    process: BaseProcess
    pipe: Connection
    keys: list[Hashable] = field(default_factory=list)


class Ahead:
    """serve: what a process does with a task: returns what else it found out, by key, which has to be picklable.

    waited_s: processor seconds of others for which this process had to wait.
    """

    def __init__(self, serve: Callable[[Task], Found], processes: int) -> None:
        self._serve, self._wanted = serve, processes
        self._helpers: list[_Helper] | None = None
        self._asked: set[Hashable] = set()
        self.found: dict[Hashable, Any] = {}
        self.waited_s = 0.0

    @staticmethod
    def refuse(processes: int) -> None:
        if type(processes) is not int or processes < 1:
            raise PlanError(f"search(processes={processes!r}): give a whole number of processes, at least 1.")
        if processes > 1 and "fork" not in multiprocessing.get_all_start_methods():
            raise PlanError(
                f"search(processes={processes}): processes are forked, which this system cannot. Leave processes away."
            )
        if processes > 1 and multiprocessing.current_process().daemon:
            raise PlanError(
                f"search(processes={processes}): this process is a daemon of multiprocessing, which may not fork. Leave "
                "processes away."
            )

    def ask(self, tasks: Sequence[Task], *, each: int = 1) -> None:
        """Those that nobody was asked for yet, as far as a process has fewer than so many."""
        if self._wanted and self._helpers is None:
            self._fork()
        for helper in list(self._helpers or []):
            self._collect(helper)
        wanted = [task for task in tasks if task.key not in self._asked]
        while wanted and (idle := [helper for helper in self._helpers or [] if len(helper.keys) < each]):
            self._send(min(idle, key=lambda helper: len(helper.keys)), wanted.pop(0))

    def take(self, key: Hashable) -> bool:
        """Whether it was asked for and is among what was found; waits where it is being traced."""
        for helper in list(self._helpers or []):
            while key in helper.keys:
                self._collect(helper, wait=True)
        return key in self.found

    def close(self) -> None:
        helpers, self._helpers, self._wanted = self._helpers or [], [], 0
        for helper in helpers:
            _end(helper)

    def _fork(self) -> None:
        self._helpers = []
        context = multiprocessing.get_context("fork")
        for _ in range(self._wanted):
            ours, theirs = context.Pipe()
            others = [ours, *(helper.pipe for helper in self._helpers)]
            process = context.Process(target=_work, args=(self._serve, theirs, others), daemon=True)
            with warnings.catch_warnings():
                # Of locks that another thread may hold: what a helper calls has none of those.
                warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
                process.start()
            theirs.close()
            self._helpers.append(_Helper(process, ours))

    def _send(self, helper: _Helper, task: Task) -> None:
        self._asked.add(task.key)
        try:
            helper.pipe.send(task)
        except (AttributeError, OSError, TypeError, pickle.PicklingError) as error:
            self._give_up(helper, f"cannot be asked: {error}")
        else:
            helper.keys.append(task.key)

    def _collect(self, helper: _Helper, *, wait: bool = False) -> None:
        """What it has sent; with wait, its next answer."""
        began = time.monotonic()
        try:
            while helper.keys and helper.pipe.poll(LONGEST_S if wait else 0):
                found, took_s = helper.pipe.recv()
                if isinstance(found, str):
                    self._give_up(helper, f"could not: {found}")
                    return
                self.found.update(found)
                helper.keys.pop(0)
                if wait:
                    self.waited_s += min(took_s, time.monotonic() - began)
                    return
        except (EOFError, OSError):
            helper.process.join()
            self._give_up(helper, f"ended with exit code {helper.process.exitcode}")
            return
        if wait:
            self._give_up(helper, f"said nothing for {LONGEST_S:.0f} s")

    def _give_up(self, helper: _Helper, why: str) -> None:
        """What it was to trace is traced here."""
        self._helpers = [each for each in self._helpers or [] if each is not helper]
        helper.keys.clear()
        _end(helper)
        left = len(self._helpers) + 1
        warnings.warn(f"search: a process that helps {why}. Going on with {left}.", stacklevel=2)


def _end(helper: _Helper) -> None:
    helper.process.kill()  # a trace that nobody waits for
    helper.process.join()
    helper.pipe.close()


def _work(serve: Callable[[Task], Found], pipe: Connection, others: list[Connection]) -> None:
    """Until the search ends: it closes its end, or is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the search
    torch.set_num_threads(1)
    for each in others:
        each.close()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        began = time.process_time()
        try:
            answer = pickle.dumps((dict(serve(task)), time.process_time() - began))
        except Exception as error:
            answer = pickle.dumps((f"{type(error).__name__}: {error}", 0.0))
        try:
            pipe.send_bytes(answer)
        except BrokenPipeError:
            return
