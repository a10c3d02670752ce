"""No program gets out of the sandbox: over 300 attempts, by kind and in each jail; the job lives, and nothing outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshkit.errors import RewardError
from meshkit.sandbox import SandboxLimits, run_sandboxed
from tests.sandbox.escapes import Escape, escapes

ROOT = Path(__file__).parents[2]
JAILS = ("bubblewrap", "unshare", "none")
KINDS = ("signal", "write", "read", "socket", "process", "right", "exhaust")
LIMITS = {"wall_s": 20.0, "cpu_s": 5, "memory_bytes": 256 << 20}
EXHAUST = {**LIMITS, "wall_s": 3.0, "cpu_s": 1}
JOB_S = 240.0
"""for all programs of one jail"""
SLACK_S = 6.0
"""for a busy machine to start processes and to end them"""

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the programs have numbers of x86-64's system calls"),
    pytest.mark.timeout(JOB_S + 60),
]


@dataclass(frozen=True)
class Attempts:
    jail: str
    programs: list[Escape]
    results: list[dict[str, Any]]
    lived: bool
    children: set[int]
    """processes that were there after the job"""


def path_of(jail: str, folder: Path) -> str:
    """A PATH on which only this jail's tools are installed; skips where the machine lacks them."""
    for tool in {"bubblewrap": ("bwrap",), "unshare": ("unshare", "setpriv"), "none": ()}[jail]:
        found = shutil.which(tool)
        if found is None:
            pytest.skip(f"{tool} is not installed")
        (folder / tool).symlink_to(found)
    return str(folder)


def limits_of(jail: str, escape: Escape) -> dict[str, Any]:
    common = EXHAUST if escape.kind == "exhaust" else LIMITS
    return {**common, **escape.limits, "namespaces": jail != "none"}


@pytest.fixture(scope="module", params=JAILS)
def attempts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attempts]:
    jail = request.param
    path = path_of(jail, tmp_path_factory.mktemp("bin"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        try:
            run_sandboxed("", limits=SandboxLimits(**limits_of(jail, Escape("read", ""))))
        except RewardError as error:
            pytest.skip(str(error))
    # The limits of processes and memory are the same code in each jail; that of files is not. bubblewrap adds walls to what
    # unshare has, and gets every third; without namespaces other walls keep signals and processes.
    plain = [each for each in escapes() if each.kind != "exhaust"]
    exhausting = [each for each in escapes() if each.kind == "exhaust"]
    programs = {
        "unshare": plain + exhausting,
        "bubblewrap": plain[::3] + [each for each in exhausting if each.limits],
        "none": [each for i, each in enumerate(plain) if each.kind in ("signal", "process") or i % 2],
    }[jail]
    folder = tmp_path_factory.mktemp("job")
    order = {
        "folder": str(folder),
        "programs": [{"code": each.code, "limits": limits_of(jail, each)} for each in programs],
    }
    before = _processes()
    job = subprocess.Popen(
        [sys.executable, "-m", "tests.sandbox.job"],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        written, _ = job.communicate(json.dumps(order), timeout=JOB_S)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait(10)
    lines = [json.loads(line) for line in written.splitlines()]
    results = [line for line in lines if "index" in line]
    yield Attempts(
        jail=jail, programs=programs, results=results, lived=job.returncode == 0, children=_left_over(before)
    )


def _processes() -> set[int]:
    """Of sandboxes: their command lines name the folder of what runs inside."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"_inside.main" in line:
                found.add(int(entry.name))
    return found


def _left_over(before: set[int]) -> set[int]:
    """Sandboxes that are there for seconds on end; other tests' come and go."""
    deadline = time.monotonic() + SLACK_S
    left = _processes() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= _processes()
    return left


@pytest.mark.parametrize("kind", KINDS)
def test_no_attempt_succeeds(attempts: Attempts, kind: str) -> None:
    mine = [(attempts.programs[each["index"]], each) for each in attempts.results]
    mine = [(escape, result) for escape, result in mine if escape.kind == kind]
    if attempts.jail == "none" and kind == "exhaust":
        assert not mine
        return
    assert len(mine) == sum(each.kind == kind for each in attempts.programs)
    escaped = [
        f"{escape.code!r}: {result}"
        for escape, result in mine
        if "ESCAPED" in result["text"] or result["changed"] or result["end"] == "passed"
    ]
    assert not escaped, "\n".join(escaped)
    # Each was really tried: it ran, and to an end of its own or of its limits.
    idle = [f"{escape.code!r}: {result}" for escape, result in mine if result["end"] == "refused"]
    if kind == "exhaust":
        idle += [f"{escape.code!r}: {r}" for escape, r in mine if r["wall_s"] > EXHAUST["wall_s"] + SLACK_S]
    else:
        idle += [f"{escape.code!r}: {result}" for escape, result in mine if result["end"] == "timed out"]
        wrong = ("SyntaxError", "NameError", "TypeError", "ImportError", "ModuleNotFoundError")
        idle += [f"{escape.code!r}: {r}" for escape, r in mine if r["text"].startswith(wrong)]
    assert not idle, "\n".join(idle)


def test_the_job_lives_and_nothing_outlives_it(attempts: Attempts) -> None:
    assert attempts.lived and len(attempts.results) == len(attempts.programs)
    assert not attempts.children


def test_there_are_200_escapes() -> None:
    assert len({(each.kind, each.code) for each in escapes()}) >= 200


STUBBORN = """
import ctypes, signal, time
for s in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(s, signal.SIG_IGN)
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
time.sleep(99)
"""
JOB = """
import os, sys, threading, time
from meshkit.sandbox import SandboxLimits, run_sandboxed
for path in sys.argv[2:]:
    os.environ["PATH"] = path
    limits = SandboxLimits(wall_s=99, namespaces=not path.endswith("none"))
    threading.Thread(target=run_sandboxed, args=(sys.argv[1],), kwargs={"limits": limits}, daemon=True).start()
    time.sleep(2)  # PATH is everyone's
    print(path, flush=True)
time.sleep(99)
"""


def test_programs_die_with_their_job(tmp_path: Path) -> None:
    """Also when they ignore every signal, and the job is killed, which runs no handler."""
    paths = []
    for jail in JAILS:
        (tmp_path / jail).mkdir()
        with contextlib.suppress(pytest.skip.Exception):
            paths.append(path_of(jail, tmp_path / jail))
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, STUBBORN, *paths],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert job.stdout is not None
        assert [job.stdout.readline().decode().strip() for _ in paths] == paths
        mine = _descendants(job.pid) & _processes()
        assert len(mine) >= len(paths)
    finally:
        os.kill(job.pid, signal.SIGKILL)
        job.communicate(timeout=10)
    deadline = time.monotonic() + SLACK_S
    while mine & _processes() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not mine & _processes()


def _descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}
