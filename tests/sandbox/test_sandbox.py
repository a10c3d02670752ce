"""A program in the sandbox computes, and can do nothing else."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from meshkit.algos.rewards import UnitTests, score
from meshkit.algos.rollout import Rollout
from meshkit.errors import RewardError
from meshkit.sandbox import SandboxLimits, _jail, run_sandboxed

# The pipe has the number that it has in the process of the tests, which may hold many files open.
TO_EVERY_PIPE = """
import contextlib, os
for pipe in range(3, 4096):
    with contextlib.suppress(OSError):
        {}
os._exit(0)
"""
ROOT = Path(__file__).parents[2]
LIMITS = SandboxLimits(wall_s=20.0, cpu_s=1, memory_bytes=256 << 20)


@pytest.mark.parametrize(
    ("program", "end", "text"),
    [
        ("import math, re, json, itertools, dataclasses\nassert math.gcd(4, 6) == 2", "ended", ""),
        ("x = 1\nassert x == 2, 'not two'", "raised", "AssertionError: not two in line 2"),
        ("def f(:", "raised", "SyntaxError"),
        ("def f(): f()\nf()", "raised", "RecursionError"),
        ("while True: pass", "timed out", "more than 1 s of processor time"),
        (
            "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
            "timed out",
            "processor time",
        ),
        ("x = bytearray(1 << 34)", "raised", "MemoryError: more than 268435456 bytes"),
        ("x = []\nwhile True: x.append(b'x' * (1 << 24))", "raised", "MemoryError"),
        ("import os\nwhile True: os.fork()", "raised", "Operation not permitted"),
        ("import subprocess\nsubprocess.run(['true'])", "raised", "Operation not permitted"),
        ("import os\nos.execv('/bin/true', ['true'])", "raised", "PermissionError"),
        ("import threading\nthreading.Thread(target=print).start()", "raised", "can't start new thread"),
        ("import socket\nsocket.socket()", "raised", "Operation not permitted"),
        ("import os\nos.kill(os.getppid(), 9)", "raised", "Operation not permitted"),
        ("open('/etc/passwd').read()", "raised", "Error: [Errno"),
        ("import os\nos.listdir('/tmp')", "raised", "Error: [Errno"),
        ("import asyncio\nassert asyncio.run(asyncio.sleep(0, 3)) == 3", "ended", ""),
        ("import ctypes\nctypes.CDLL(None).reboot", "ended", ""),  # to look is allowed
        ("import os\nos.setuid(0) if os.getuid() else os.setgroups([1])", "raised", "Operation not permitted"),
        ("raise SystemExit(0)", "raised", "SystemExit: 0"),
        ("import os\nos._exit(0)", "killed", "it left before its end: exit status 0"),
        (TO_EVERY_PIPE.format("os.write(pipe, b'x')"), "killed", "it left before its end: exit status 0"),
        (TO_EVERY_PIPE.format("while True: os.write(pipe, b'x' * 999)"), "killed", "it left before its end"),
        (TO_EVERY_PIPE.format('os.write(pipe, b\'{"refused": "no"}\\n\')'), "killed", "it left before its end"),
        (TO_EVERY_PIPE.format("os.write(pipe, b'[' * 9999 + b'\\n')"), "killed", "it left before its end"),
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


def test_a_folder_of_its_own_is_there_if_files_may_be_written_and_is_gone_afterwards() -> None:
    limits = SandboxLimits(file_bytes=1000)
    wrote = (
        "import os\nopen('a', 'w').write('x' * 900)\nassert len(open('a').read()) == 900\nraise SystemExit(os.getcwd())"
    )
    verdict = run_sandboxed(wrote, limits=limits)
    folder = verdict.text.removeprefix("SystemExit: ").removesuffix(" in line 4 of the program")
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


VECTOR = """
import collections, decimal, fractions
class Vector:
    def __init__(self, *xs): self.xs = list(xs)
    def __add__(self, other): return Vector(*(a + b for a, b in zip(self.xs, other.xs)))
    def __eq__(self, other): return True
    def __repr__(self): return f"Vector{tuple(self.xs)}"
def same(x): return x
def kinds():
    yield from (None, True, 1 << 5000, -0.0, float("inf"), 1j, b"a", bytearray(b"b"), (1, [2]), {3: {4}}, frozenset({5}))
    yield from (range(9, 1, -2), collections.Counter("aab"), collections.deque([1]), collections.OrderedDict(a=1))
    yield from (fractions.Fraction(1, 3), decimal.Decimal("0.10"), "\\ud800")
SIZE = 3
def grow():
    global SIZE
    SIZE += 1
"""


@pytest.mark.parametrize(
    ("tests", "text"),
    [
        ("assert (Vector(1, 2) + Vector(3, 4)).xs == [4, 6]", ""),
        ("assert repr(Vector(1)) == 'Vector(1,)' and isinstance(Vector(), Vector) and not isinstance(3, Vector)", ""),
        ("v = Vector()\nv.xs = [1]\nassert v.xs == [1] and same(v) is v and v == v and v != None", ""),
        ("for x in kinds(): assert type(same(x)) is type(x) and repr(same(x)) == repr(x), x", ""),
        ("assert len(list(kinds())) == 18", ""),
        ("assert SIZE == 3\ngrow()\nassert SIZE == 4", ""),
        ("class T:\n    def t(self): assert same([1]) == [1]\nT().t()", ""),
        ("assert Vector(1) == Vector(1)", "Undecided: the tests use == of a program's object"),
        ("try:\n    assert Vector(1) == Vector(1)\nexcept BaseException: pass", "Undecided: the tests use == of"),
        ("assert Vector(1) + 1", "Undecided: the tests use the operator add of a program's object"),
        ("assert collections.deque", "Undecided: a name of the tests is a module that only the program imports"),
        (
            "same(object())",
            "TypeError: a test passes an object of object; a program is given plain data, functions and its own objects",
        ),
        ("assert same(1) == 2, 'not two'", "AssertionError: not two in line 1 of the tests"),
        ("nothing(1)", "NameError: name 'nothing' is not defined in line 1 of the tests"),
        ("raise SystemExit(0)", "SystemExit: 0 in line 1 of the tests"),
        ("def f(:", "SyntaxError: invalid syntax (<unknown>, line 1) in line 1 of the tests"),
    ],
)
def test_tests_are_judged_in_their_own_interpreter(tests: str, text: str) -> None:
    verdict = run_sandboxed(VECTOR, tests=tests, limits=LIMITS)
    assert (verdict.end, verdict.text) == ("passed", "") if not text else text in verdict.text, verdict


def test_imports_of_a_prelude_are_the_tests_too() -> None:
    fields = {"prelude": "import math\ndef f(x):\n", "tests": "assert f(3) == 3 and math.isclose(1, 1)"}
    answers = [Rollout(text=text, ids=np.arange(3), fields=fields) for text in ("    return x", "    return math.pi")]
    np.testing.assert_array_equal(score(answers, UnitTests(limits=LIMITS)).totals, [1, 0])


# What a host cannot offer is refused


ASK = """
import numpy as np
from meshkit.algos.rewards import SandboxLimits, UnitTests, score
from meshkit.algos.rollout import Rollout
answer = Rollout(text="x = 1", ids=np.arange(3), fields={"tests": "assert x"})
for namespaces in (True, False):
    scores = score([answer], UnitTests(limits=SandboxLimits(wall_s=20.0, namespaces=namespaces)))
    print(scores.unscored, scores.totals, scores.first_unscored)
"""


@pytest.mark.parametrize("tool", ["bwrap", "unshare"])
def test_without_namespaces_nothing_runs_and_nobody_is_wrong(tool: str, tmp_path: Path) -> None:
    """A host that allows none: made by a namespace in which no further one may be made."""
    for name in (tool, "setpriv"):
        if (found := shutil.which(name)) is None:
            pytest.skip(f"{name} is not installed")
        (tmp_path / name).symlink_to(found)
    unshare, shell = shutil.which("unshare"), shutil.which("sh")
    command = [str(unshare), "--user", "--map-root-user", str(shell), "-c"]
    if unshare is None or shell is None or subprocess.run([*command, ":"], capture_output=True, timeout=60).returncode:
        pytest.skip("users may have no namespaces here")
    job = subprocess.run(
        [*command, f'echo 0 > /proc/sys/user/max_user_namespaces; exec {sys.executable} -c "$0"', ASK],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.stdout.count("\n") == 2, job
    refused, runs = job.stdout.splitlines()
    assert refused.startswith(
        "{'raised': 1} [nan] raised: UnitTests: RewardError: run_sandboxed: the jail did not start: "
    )
    assert refused.endswith("Allow user namespaces, or pass SandboxLimits(namespaces=False) on Linux 6.12 or later.")
    assert runs == "{} [1.] None"


def test_without_a_tool_that_makes_namespaces_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        RewardError, match="neither bwrap nor unshare and setpriv are installed. Install bubblewrap, or"
    ):
        run_sandboxed("")


def test_files_without_a_file_system_of_their_own_are_refused() -> None:
    with pytest.raises(
        RewardError, match=r"file_bytes=9, namespaces=False\): without a mount namespace nothing bounds"
    ):
        run_sandboxed("", limits=SandboxLimits(file_bytes=9, namespaces=False))


@pytest.mark.parametrize(
    ("version", "namespaces", "text"),
    [
        ("version < 1", True, "run_sandboxed: the kernel has no Landlock. Run it on Linux 5.13 or later"),
        (
            "version < 6",
            False,
            "namespaces=False needs Landlock's signal scope (version 6), but the kernel has version",
        ),
    ],
)
def test_an_older_kernel_is_refused(
    version: str, namespaces: bool, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the inside sees one: it asks for a version that no kernel has."""
    shutil.copytree(_jail.INSIDE / "_inside", tmp_path / "_inside")
    confine = tmp_path / "_inside" / "confine.py"
    confine.write_text(confine.read_text().replace(version, "version < 1000"))
    monkeypatch.setattr(_jail, "INSIDE", tmp_path)
    with pytest.raises(RewardError, match=re.escape(text)):
        run_sandboxed("", tests="", limits=SandboxLimits(wall_s=20.0, namespaces=namespaces))
