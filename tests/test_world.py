"""Worlds of tests end: with pytest, whatever their ranks are in, and soon after all of their ranks are stuck."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import world
from tests.world import RankError, World, pool, run_ranks

ROOT = Path(__file__).parents[1]
END_S = 20.0  # it takes milliseconds; the machine may be busy
# Programs that start three ranks in `hang`, whose process ids they print.
FORKED = "from tests.world import run_ranks; from tests.test_world import hang; run_ranks(3, hang)"
UNDER_TORCHRUN = """
from tests.recipes.launch import start
for line in start(3, "tests/recipes/hanging_ranks.py").stdout:
    print(line, end="", flush=True)
"""


def hang() -> None:
    """One rank in a collective, one in Python, one in native code that holds the interpreter's lock."""
    os.write(1, b"%d\n" % os.getpid())
    rank = dist.get_rank()
    if rank == 0:
        dist.barrier()
    while rank == 1:
        pass
    ctypes.PyDLL(None).sleep(1000)


def ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("program", [FORKED, UNDER_TORCHRUN], ids=["forked", "torchrun"])
def test_ranks_end_when_the_process_that_started_them_is_killed(program: str) -> None:
    command, environment = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            lines = (line for line in process.stdout if line.strip().isdigit())  # torchrun says more
            ranks = [int(line) for line in islice(lines, 3)]
            assert len(ranks) == 3
            time.sleep(0.5)  # until all are in what they hang in
            assert not any(map(ended, ranks))
        finally:
            process.kill()
        until = time.monotonic() + END_S
        while not all(map(ended, ranks)):
            assert time.monotonic() < until, [rank for rank in ranks if not ended(rank)]
            time.sleep(0.01)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "LOOK_S", 0.2)
    monkeypatch.setattr(world, "STUCK_LOOKS", 3)
    monkeypatch.setattr(world, "UNANSWERED", {})


def wait_for_each_other() -> None:
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())


def forget_to_wait() -> None:
    """Gloo's thread spins once a buffer is gone that a message is to come into."""
    other = 1 - dist.get_rank()
    for _ in range(2):
        works = [dist.isend(torch.zeros(1), other), dist.irecv(torch.zeros(1), other)]
        del works
    dist.recv(torch.zeros(1), src=other)


# Gloo's thread has no name on torch 2.11, and wakes all the time: stuck ranks are not told from slow ones there.
NAMED_THREADS = pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="gloo's thread has no name on torch 2.11"
)


@NAMED_THREADS
@pytest.mark.parametrize("function", [wait_for_each_other, forget_to_wait])
def test_stuck_ranks_say_soon_where_they_stand(function: Callable[[], None], soon: None) -> None:
    ranks = World(2)
    began = time.monotonic()
    with pytest.raises(
        RankError, match=rf"no answer from rank \[0, 1\] in {function.__name__} and they are stuck"
    ) as told:
        ranks.run(function)
    assert str(told.value).count(f"in {function.__name__}\n") == 2, "the stack of each rank names the line"
    assert time.monotonic() - began < 60, "time is up after 120"


@NAMED_THREADS
def test_ranks_that_did_not_answer_are_not_asked_the_same_again(soon: None) -> None:
    """As hypothesis does, which runs an example again that failed."""
    with pytest.raises(RankError, match="they are stuck") as first:
        run_ranks(2, wait_for_each_other)
    with pytest.raises(RankError) as second:
        pool(2).run(wait_for_each_other)
    assert second.value is first.value


def one_computes() -> None:
    until = time.monotonic() + 2
    while dist.get_rank() == 0 and time.monotonic() < until:
        torch.rand(10)
    dist.barrier()


def one_waits_for_a_child() -> None:
    if dist.get_rank() == 0:
        subprocess.run(["sleep", "2"], check=True)
    dist.barrier()


@pytest.mark.parametrize("function", [one_computes, one_waits_for_a_child])
def test_ranks_that_wait_for_a_slow_one_are_not_stuck(function: Callable[[], None], soon: None) -> None:
    pool(2).run(function)


def test_ranks_that_are_late_say_where_they_stand(soon: None) -> None:
    with pytest.raises(RankError, match=r"no answer from rank \[0\] in one_computes within 0\.5 s\nrank 0 stands at"):
        run_ranks(1, one_computes, timeout_s=0.5)
