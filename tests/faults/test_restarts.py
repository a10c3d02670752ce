"""A rank that dies is started anew in place, and the job goes on from memory: bit for bit as if it had never died."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshkit.errors import PlanError
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


def lines(out: Path) -> list[Line]:
    """Of the first rank's file, without a line that is half written."""
    text = (out / "steps").read_text() if (out / "steps").exists() else ""
    words = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [Line(word, int(life), int(step), float(at)) for word, life, step, at in words]


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
    assert "rank 1 on " in output and "ended with exit code 1: all ranks start anew, 1 of 3." in output
    assert output.count("ended by SIGKILL: all ranks start anew") == 2, output
    told = lines(struck)
    for before, after in pairwise(told):
        if after.word == "start":
            assert after.step in (before.step, before.step + 1), output  # none lost; a kill may come before the line


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
        supervise(1)
