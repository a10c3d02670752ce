"""The thread beside the training takes nothing from the process: its children end when told, and so does it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable

import pytest

from meshkit.faults.watchdog import Watchdog
from tests.world import fork


def ends_a_child() -> None:
    Watchdog(stall_s=60)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(20)
    time.sleep(1.5)  # were the child's signal this process's too, it would end
    os._exit(0 if child.exitcode == -signal.SIGTERM else 1)


def never_ends() -> None:
    Watchdog(stall_s=60)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def fails_to_beat() -> None:
    watchdog = Watchdog(stall_s=60)
    failed = 0

    def fail() -> None:
        nonlocal failed
        failed += 1
        raise ValueError("no such line")

    watchdog._beat_and_watch = fail  # type: ignore[method-assign]
    deadline = time.monotonic() + 30
    while failed < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    if failed < 2:
        os._exit(3)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@pytest.mark.parametrize(
    ("act", "status"),
    [(ends_a_child, 0), (never_ends, 128 + signal.SIGTERM), (fails_to_beat, 128 + signal.SIGTERM)],
)
def test_a_signal_ends_the_process_it_is_for(act: Callable[[], None], status: int) -> None:
    process = fork(act)
    process.join(40)
    assert process.exitcode == status
