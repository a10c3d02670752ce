"""A rank that dies is started anew in place, and the job goes on from memory: bit for bit as if it had never died."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.errors import PlanError
from meshkit.faults import Restarts
from meshkit.faults.crew import next_members
from meshkit.faults.supervise import supervise
from tests.depth import DEEP, thin
from tests.recipes.launch import ROOT, TORCHRUN, command_line, finish, start_command

SCRIPT = str(ROOT / "tests/faults/restarted.py")
WAIT_S = 120.0
STEPS = 14


@dataclass(frozen=True)
class Line:
    word: str
    life: int
    step: int
    time: float
    loss: float


def lines(out: Path) -> list[Line]:
    """Of the first rank's file, without a line that is half written."""
    text = (out / "steps").read_text() if (out / "steps").exists() else ""
    words = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [Line(word, int(life), int(step), float(at), float(loss)) for word, life, step, at, loss in words]


def wait_for_step(out: Path, life: int, step: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while not any(each.word == "step" and each.life == life and each.step >= step for each in lines(out)):
        assert time.monotonic() < deadline, f"step {step} of life {life} did not come"
        time.sleep(0.01)


def states(out: Path, ranks: int) -> list[str]:
    return [(out / f"state-{rank}").read_text() for rank in range(ranks)]


def start(out: Path, ranks: int, **values: Any) -> subprocess.Popen[str]:
    flags = command_line({"out": out}, **values)
    return start_command([*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), SCRIPT, *flags])


@pytest.mark.parametrize("mesh", thin(["dp_shard=2 tp=2", "pp=2 dp_replicate=2", "cp=2 dp_shard=2"], 3))
def test_killed_twice_and_raised_once_it_ends_as_if_nothing_had_been(tmp_path: Path, mesh: str) -> None:
    whole, struck, draw = tmp_path / "whole", tmp_path / "struck", random.Random(None if DEEP else mesh)
    status, output = finish(start(whole, 4, mesh=mesh, steps=STEPS, restarts=0))
    assert status == 0, output
    job = start(struck, 4, mesh=mesh, steps=STEPS, raises=3)
    for life, step in ((1, 5), (2, 9)):
        wait_for_step(struck, life, step)
        time.sleep(0.2 * draw.random())
        os.kill(int((struck / f"pid-{draw.randrange(4)}").read_text()), signal.SIGKILL)
    status, output = finish(job)
    assert status == 0, output
    assert states(struck, 4) == states(whole, 4)
    assert "\nrank 1 ended with exit code 1: all ranks start anew, 1 of 3.\n" in output
    assert output.count("ended by SIGKILL: all ranks start anew") == 2, output
    told = lines(struck)
    for before, after in pairwise(told):
        if after.word == "start":
            # A kill may come before the line of a step that all have kept, or while a rank still copies what the first has.
            assert abs(after.step - before.step) <= 1, output


def test_restarts_are_counted_and_the_last_error_ends_the_job(tmp_path: Path) -> None:
    job = start(tmp_path, 2, mesh="dp_shard=2", steps=4, raises=2, restarts=0)
    status, output = finish(job)
    assert status != 0
    assert "RuntimeError (rank 1): this rank has had enough" in output
    assert "anew" not in output


def test_a_process_that_uses_a_device_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.get_device_module", lambda: SimpleNamespace(is_initialized=lambda: True))
    with pytest.raises(PlanError, match=r"run_main\(restarts=...\) forks, and this process uses a device already."):
        supervise(Restarts(times=1))


LIVES = st.sets(st.integers(0, 9))


@given(st.integers(1, 6), LIVES, st.integers(1, 4))
def test_who_lives_keeps_its_rank_and_the_lost_are_replaced_by_who_has_none(
    ranks: int, alive: set[int], multiple: int
) -> None:
    before = tuple(range(ranks))
    members = next_members(before, alive, ranks=ranks, multiple=None)
    assert (members is None) == (len(alive) < ranks)
    if members is not None:
        assert len({*members}) == ranks and {*members} <= alive
        assert all(members[rank] == rank for rank in before if rank in alive)
    fewer = next_members(before, alive, ranks=ranks, multiple=multiple)
    assert fewer == members if members is not None else len(fewer or ()) == len(alive) // multiple * multiple
    if fewer:  # and when all come back, all are there again
        again = next_members(fewer, {*alive, *range(ranks)}, ranks=ranks, multiple=multiple)
        assert again is not None and len({*again}) == ranks and again[: len(fewer)] == fewer


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("3", Restarts(times=3)),
        ("", Restarts(times=0)),
        ("2 spares=1 multiple=8", Restarts(times=2, spares=1, multiple=8)),
    ],
)
def test_the_variable_of_a_launch_line(text: str, means: Restarts) -> None:
    assert Restarts.parse(text) == means


@pytest.mark.parametrize("text", ["often", "-1", "3 spare=1", "3 spares=x", "3 spares"])
def test_what_is_no_number_of_restarts_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match='is no number of restarts. Give "3", or "3 spares=1 multiple=8"'):
        Restarts.parse(text)


def test_a_spare_takes_the_rank_of_a_process_that_is_gone_with_its_supervisor(tmp_path: Path) -> None:
    """Without torchrun, which would end the others."""
    struck, whole = tmp_path / "struck", tmp_path / "whole"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    told = command_line({"out": struck}, mesh="dp_shard=2", steps=STEPS, restarts="3 spares=1", pause_s=0.1)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3"}
    jobs = [
        start_command([sys.executable, SCRIPT, *told], RANK=str(rank), LOCAL_RANK="0", **world) for rank in range(3)
    ]
    wait_for_step(struck, 0, 4)
    jobs[1].kill()  # the kernel ends its rank with it
    ended = [finish(job) for job in jobs]
    assert [status for status, _ in ended] == [0, -signal.SIGKILL, 0], ended
    assert "all ranks start anew, 1 of 3." in ended[0][1]
    starts = [each for each in lines(struck) if each.word == "start"]
    assert [each.life for each in starts] == [0, 1]
    assert starts[1].step >= 3  # the copies of the step that was just ended may not have come to their neighbours
    status, output = finish(start(whole, 2, mesh="dp_shard=2", steps=STEPS, restarts="0"))
    assert status == 0, output
    assert states(struck, 2) == states(whole, 2)
