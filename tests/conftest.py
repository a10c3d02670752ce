"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import tests.depth  # noqa: F401  # sets how much hypothesis draws
from tests.turns import take_turns, turn
from tests.world import CRASHES

# Each connection to a store asks for the name of its address, and a machine that does not know `::1` asks a name server.
# Where that drops a question, a rank waits 5 s by default (every 25th connection on the machine where it was found).
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

RUN_AGAIN = "run again, since a rank ended in native code"


@pytest.fixture(autouse=True)
def no_world_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Meshes live on the ranks of `tests.world`: a process group here would be another test's surprise."""
    crashes = len(CRASHES)
    yield
    for crash in CRASHES[crashes:]:  # a worker's, so they travel with its report
        request.node.user_properties.append((RUN_AGAIN, crash))
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("made a process group in pytest's own process: use tests.world.pool(1).run(...)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    take_turns(config, items, turn())


def pytest_report_header() -> str:
    day = turn()
    return "" if day is None else f"of tests that take turns those of day {day}; make test-deep runs all"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("", []):  # of what comes before and after a test
        for kind, crash in report.user_properties:
            if kind == RUN_AGAIN:
                terminalreporter.write_line(f"{kind}: {crash}", yellow=True)
