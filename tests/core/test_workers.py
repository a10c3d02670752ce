"""Worker processes: calls that end, hang, raise and kill, and the end of the workers in the middle of it."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import Any

import pytest

from meshkit.core.workers import CallFailed, WorkerDied, Workers


def act(word: str) -> str:
    if word == "hang":
        time.sleep(60)
    if word == "die":
        os._exit(7)
    if word == "raise":
        raise ValueError("odd")
    return word.upper()


def outcome(future: Future[Any]) -> str:
    try:
        return str(future.result(60))
    except (TimeoutError, CallFailed, WorkerDied) as error:
        return type(error).__name__


def test_a_call_that_hangs_dies_or_raises_ends_no_other() -> None:
    workers = Workers(act, count=2, timeout_s=1.0)
    futures = [workers.submit(word) for word in ("a", "hang", "die", "raise", "b", "c")]
    assert [outcome(each) for each in futures] == ["A", "TimeoutError", "WorkerDied", "CallFailed", "B", "C"]
    workers.close()


@pytest.mark.parametrize("moment_s", [0.0, 0.3, 0.6])
def test_closed_at_any_moment_they_leave_no_file_open_and_close_no_other(moment_s: float) -> None:
    """A worker that is replaced as they are closed: its pipe was closed twice, the second time perhaps another's file."""
    Workers(act, count=1, timeout_s=1.0).close()  # the forkserver's own pipes, made at its first use, stay
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    workers = Workers(act, count=2, timeout_s=0.3)
    futures = [workers.submit(word) for word in ("hang", "die", "a", "hang", "b")]
    time.sleep(moment_s)
    workers.close()
    assert all(each.done() for each in futures[:2])
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before
