"""What does a run in the sandbox cost, beside an interpreter that does nothing?

    python benchmarks/sandbox.py                     # one minute
    python benchmarks/sandbox.py --before 4e54553    # beside the sandbox of an earlier commit, too

One small program with three asserts, in each jail that the machine has. All ways take turns; a ratio is taken within a round,
and its median over rounds is printed with its quartiles.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table
from rows import spread

from meshkit.sandbox import SandboxLimits, run_sandboxed

ROOT = Path(__file__).parents[1]
PROGRAM = "def f(x): return x + x"
TESTS = "assert f(2) == 4\nassert f('a') == 'aa'\nassert f([1]) == [1, 1]"
TOOLS = {"bubblewrap": ("bwrap",), "unshare": ("unshare", "setpriv")}


@dataclass(frozen=True, kw_only=True)
class Config:
    rounds: int = 30
    before: str | None = None
    """a commit with `meshkit/algos/rewards/_sandbox.py`"""


def bare() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-B", "-c", "pass"], check=True, env={})


def in_jail(path: str, *, namespaces: bool, tests: str | None) -> Callable[[], None]:
    def run() -> None:
        os.environ["PATH"] = path
        verdict = run_sandboxed(PROGRAM, tests=tests, limits=SandboxLimits(wall_s=60.0, namespaces=namespaces))
        assert verdict.end == ("ended" if tests is None else "passed"), verdict

    return run


def earlier(commit: str, folder: Path) -> Callable[[], None]:
    package = folder / "earlier"
    package.mkdir()
    for name in ("_sandbox.py", "_sandbox_child.py"):
        source = ["git", "show", f"{commit}:meshkit/algos/rewards/{name}"]
        (package / name).write_bytes(subprocess.run(source, cwd=ROOT, check=True, capture_output=True).stdout)
    sys.path.insert(0, str(folder))
    module = importlib.import_module("earlier._sandbox")

    def run() -> None:
        verdict = module.run_sandboxed(f"{PROGRAM}\n{TESTS}")
        assert verdict.end == "passed", verdict

    return run


def main(config: Config) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways: dict[str, Callable[[], None]] = {"an interpreter that does nothing": bare}
        if config.before:
            ways[f"program and tests, {config.before}"] = earlier(config.before, folder)
        for tool, programs in TOOLS.items():
            found = [shutil.which(each) for each in programs]
            if None not in found:
                (folder / tool).mkdir()
                for each, path in zip(programs, found, strict=True):
                    (folder / tool / each).symlink_to(str(path))
                ways[f"program, {tool}"] = in_jail(str(folder / tool), namespaces=True, tests=None)
                ways[f"program and tests, {tool}"] = in_jail(str(folder / tool), namespaces=True, tests=TESTS)
        ways["program and tests, no namespaces"] = in_jail("", namespaces=False, tests=TESTS)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(config.rounds):
            for way, run in ways.items():
                began = time.perf_counter()
                run()
                seconds[way].append(time.perf_counter() - began)
    base = f"program and tests, {config.before}" if config.before else "an interpreter that does nothing"
    table = Table("a run of", "ms", f"times {base}")
    for way, values in seconds.items():
        ratio = spread([value / other for value, other in zip(values, seconds[base], strict=True)])
        median = spread(values).median * 1e3
        table.add_row(way, f"{median:.0f}", f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
    Console(width=120).print(table)


if __name__ == "__main__":
    main(tyro.cli(Config))
