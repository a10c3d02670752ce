"""Tests that take turns: of the dear files `make test` runs a part, another one each day; `make test-deep`, and pytest, all.

What a file costs is in costs.json, and from that follows in how many days each of its cells comes once: cheap files, and
files that are not in there yet, run always. The day is that of the last commit, so a commit has the same tests on every
machine and in every run.

    make test TURN= PYTEST_ADDOPTS=--junitxml=costs.xml    # all tests
    python -m tests.turns costs.xml                        # what they took, into costs.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from xml.etree import ElementTree
from zlib import crc32

import pytest

DAY_S = 86_400
COSTS = Path(__file__).parent / "costs.json"
PART_S = 3.0  # of a file, a day
ROUND = 16  # days, at most


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
        every = mark.args[0] if mark is not None else days_of(test.partition("::")[0])
        (kept if has_turn(test, seen[test], every, day=day) else waiting).append(item)
        seen[test] += 1
    config.hook.pytest_deselected(items=waiting)
    items[:] = kept


def has_turn(test: str, cell: int, every: int, *, day: int) -> bool:
    """A test of at least `every` cells has one of them each day, and each cell comes once in `every` days."""
    return (crc32(test.encode()) + cell + day) % every == 0


def days_of(file: str) -> int:
    """In how many days each cell of a file comes once: a power of two up to `ROUND`, so that a day's part takes `PART_S`."""
    every = 1
    while every < ROUND and costs().get(file, 0.0) > PART_S * every:
        every *= 2
    return every


@cache
def costs() -> dict[str, float]:
    """file -> seconds of all its tests on one worker, where they are more than `PART_S`. Of a few runs on two cores: which
    files are dear is all that is read of it."""
    found: dict[str, float] = json.loads(COSTS.read_text())
    return found


def costs_of(junit: str) -> dict[str, float]:
    """Of a report of pytest's."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(junit).iter("testcase"):
        seconds[f"{case.attrib['classname'].replace('.', '/')}.py"] += float(case.attrib["time"])
    return {file: round(spent, 1) for file, spent in sorted(seconds.items()) if spent > PART_S}


if __name__ == "__main__":
    COSTS.write_text(json.dumps(costs_of(sys.argv[1]), indent=1) + "\n")
