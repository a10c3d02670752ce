"""Tests that take turns: of the dear ones `make test` runs a part, another one each day; `make test-deep`, and pytest, all.

`pytestmark = pytest.mark.turns(4)` in a file: of each test's cells, and of tests that have none, one in four has its turn.
The day is that of the last commit, so a commit has the same tests on every machine and in every run.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path
from zlib import crc32

import pytest

DAY_S = 86_400


def turn() -> int | None:
    """The day by MESHKIT_TEST_TURN: a number, or "commit", which is 0 where there is no git. None where all tests run."""
    said = os.environ.get("MESHKIT_TEST_TURN", "")
    if said != "commit":
        return int(said) if said else None
    log = ["git", "-C", str(Path(__file__).parent), "log", "-1", "--format=%ct"]
    try:
        return int(subprocess.run(log, capture_output=True, text=True, check=True, timeout=30).stdout) // DAY_S
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def take_turns(config: pytest.Config, items: list[pytest.Item], day: int | None) -> None:
    """Leaves those whose turn it is."""
    if day is None:
        return
    seen: Counter[str] = Counter()  # cells of each test
    kept, waiting = [], []
    for item in items:
        test, mark = item.nodeid.partition("[")[0], item.get_closest_marker("turns")
        runs = mark is None or has_turn(test, seen[test], *mark.args, day=day)
        seen[test] += 1
        (kept if runs else waiting).append(item)
    config.hook.pytest_deselected(items=waiting)
    items[:] = kept


def has_turn(test: str, cell: int, every: int, *, day: int) -> bool:
    """A test of at least `every` cells has one of them each day, and each cell comes once in `every` days."""
    return (crc32(test.encode()) + cell + day) % every == 0
