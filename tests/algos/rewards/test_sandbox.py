"""A program in the sandbox computes, and can do nothing else."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import numpy as np
import pytest

from meshkit.algos.rewards import SandboxLimits, UnitTests, _sandbox, run_sandboxed, score
from meshkit.algos.rollout import Rollout

# The pipe has the number that it has in the process of the tests, which may hold many files open.
TO_EVERY_PIPE = """
import contextlib, os
for pipe in range(3, 4096):
    with contextlib.suppress(OSError):
        {}
os._exit(0)
"""
LIMITS = SandboxLimits(wall_s=20.0, cpu_s=1, memory_bytes=256 << 20)


@pytest.mark.parametrize(
    ("program", "end", "text"),
    [
        ("import math, re, json, itertools, dataclasses\nassert math.gcd(4, 6) == 2", "passed", ""),
        ("x = 1\nassert x == 2, 'not two'", "raised", "AssertionError: not two in line 2"),
        ("def f(:", "raised", "SyntaxError"),
        ("def f(): f()\nf()", "raised", "RecursionError"),
        ("while True: pass", "timed out", "more than 1 s of processor time"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "killed", "SIGKILL"),
        ("x = bytearray(1 << 34)", "raised", "MemoryError: more than 268435456 bytes"),
        ("x = []\nwhile True: x.append(b'x' * (1 << 24))", "raised", "MemoryError"),
        ("import os\nwhile True: os.fork()", "raised", "Operation not permitted"),
        ("import subprocess\nsubprocess.run(['true'])", "raised", "Operation not permitted"),
        ("import os\nos.execv('/bin/true', ['true'])", "raised", "PermissionError"),
        ("import threading\nthreading.Thread(target=print).start()", "raised", "can't start new thread"),
        ("import socket\nsocket.socket()", "raised", "Operation not permitted"),
        ("import os\nos.kill(os.getppid(), 9)", "raised", "Operation not permitted"),
        ("open('/etc/passwd').read()", "raised", "Permission denied"),
        ("import os\nos.listdir('/tmp')", "raised", "Permission denied"),
        ("import ctypes\nctypes.CDLL(None).reboot", "passed", ""),  # to look is allowed
        ("import os\nos.setuid(0) if os.getuid() else os.setgroups([1])", "raised", "Operation not permitted"),
        ("raise SystemExit(0)", "raised", "SystemExit: 0"),
        ("import os\nos._exit(0)", "killed", "it left before its end: exit status 0"),
        (TO_EVERY_PIPE.format("os.write(pipe, b'x')"), "killed", "it left before its end: exit status 0"),
        (TO_EVERY_PIPE.format("while True: os.write(pipe, b'x' * 999)"), "killed", "SIGKILL"),
    ],
)
def test_how_programs_end(program: str, end: str, text: str) -> None:
    verdict = run_sandboxed(program, limits=LIMITS)
    assert (verdict.end, text in verdict.text) == (end, True), verdict


def test_one_that_waits_is_killed_when_its_time_is_up() -> None:
    began = time.monotonic()
    verdict = run_sandboxed("import time\ntime.sleep(100)", limits=SandboxLimits(wall_s=0.7))
    assert (verdict.end, verdict.text) == ("timed out", "not done within 0.7 s")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "attempt",
    [
        "open({path!r}, 'w')",
        "open({path!r}, 'a')",
        "import os; os.remove({path!r})",
        "import os; os.truncate({path!r}, 0)",
        "import os; os.rename({path!r}, {path!r} + '2')",
        "import os; os.chmod({path!r}, 0)",
        "import os; os.utime({path!r}, (0, 0))",
        "open({path!r} + '2', 'w')",
        "import os; os.mkdir({path!r} + '2')",
        "import os; os.symlink('/', {path!r} + '2')",
        "open({path!r}).read()",
    ],
)
def test_files_of_others_are_neither_changed_nor_read(attempt: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    before = os.stat(kept)
    for limits in (LIMITS, SandboxLimits(file_bytes=1000)):
        verdict = run_sandboxed(attempt.format(path=str(kept)), limits=limits)
        assert (verdict.end, "PermissionError" in verdict.text) == ("raised", True), verdict
    assert kept.read_text() == "mine" and os.listdir(tmp_path) == ["kept.txt"]
    assert (os.stat(kept).st_mode, os.stat(kept).st_mtime) == (before.st_mode, before.st_mtime)


def test_a_folder_of_its_own_is_there_if_files_may_be_written_and_is_gone_afterwards() -> None:
    limits = SandboxLimits(file_bytes=1000)
    wrote = (
        "import os\nopen('a', 'w').write('x' * 900)\nassert len(open('a').read()) == 900\nraise SystemExit(os.getcwd())"
    )
    verdict = run_sandboxed(wrote, limits=limits)
    folder = verdict.text.removeprefix("SystemExit: ").removesuffix(" in line 4")
    assert "meshkit-sandbox-" in folder and not os.path.exists(folder)
    assert "File too large" in run_sandboxed("with open('a', 'w') as f: f.write('x' * 1001)", limits=limits).text


def test_code_is_worth_1_if_it_passes_its_tests() -> None:
    tests = "assert double(2) == 4\nassert double('a') == 'aa'"
    texts = [
        "def double(x): return x + x",
        "Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone.",
        "def double(x): return 4",
        "def double(x): return x + x\nraise SystemExit(0)",
        "not Python",
    ]
    rows = [{"tests": tests}] * len(texts) + [{"prelude": "def double(x):\n", "tests": tests}, {}]
    texts += ["    return x * 2\n", "def double(x): return x + x"]
    answers = [Rollout(text=text, ids=np.arange(3), fields=row) for text, row in zip(texts, rows, strict=True)]
    scores = score(answers, UnitTests(limits=LIMITS))
    np.testing.assert_array_equal(scores.totals, [1, 1, 0, 0, 0, 1, math.nan])
    assert scores.first_unscored == "raised: UnitTests: KeyError: 'tests'"


def test_without_a_sandbox_nothing_runs_and_nobody_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An older kernel: the child finds no Landlock."""
    child = tmp_path / "child.py"
    child.write_text(_sandbox._CHILD.read_text().replace("version < 1", "version < 1000"))
    monkeypatch.setattr(_sandbox, "_CHILD", child)
    answers = [Rollout(text="x = 1", ids=np.arange(3), fields={"tests": "assert x"})]
    scores = score(answers, UnitTests())
    assert scores.unscored == {"raised": 1}
    assert "run_sandboxed: the kernel has no Landlock. Run it on Linux 5.13 or later" in str(scores.first_unscored)
