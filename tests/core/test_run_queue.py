"""How long threads of this process waited for a processor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from meshkit.core.run_queue import others_starved, starved_s


def test_a_process_beside_others_waits_for_a_processor_and_one_that_sleeps_does_not() -> None:
    if not sys.platform.startswith("linux") or starved_s() == 0:
        pytest.skip("this kernel does not say how long threads wait")
    began = starved_s()
    time.sleep(0.2)
    asleep_s = starved_s() - began
    spinning = [sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(spinning) for _ in range(4 * (os.cpu_count() or 1))]
    try:
        began, until = starved_s(), time.monotonic() + 2
        while time.monotonic() < until:
            pass
        busy_s = starved_s() - began
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert busy_s > max(0.5, asleep_s)


def test_what_other_threads_wait_is_told() -> None:
    if not sys.platform.startswith("linux") or starved_s() == 0:
        pytest.skip("this kernel does not say how long threads wait")
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(10_000))

    spinning = [sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(spinning) for _ in range(4 * (os.cpu_count() or 1))]
    busy = threading.Thread(target=spin)
    busy.start()
    try:
        with others_starved() as asked:
            began = asked()
            time.sleep(2)  # this thread is not ready to run meanwhile
            waited_s = asked() - began
    finally:
        stop.set()
        busy.join()
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert waited_s > 0.3
