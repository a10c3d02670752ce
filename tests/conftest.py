"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

import tests.depth  # noqa: F401  # sets how much hypothesis draws
from tests.world import CRASHES


@pytest.fixture(autouse=True)
def no_world_is_left_behind() -> Iterator[None]:
    """Meshes live on the ranks of `tests.world`: a process group here would be another test's surprise."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("made a process group in pytest's own process: use tests.world.pool(1).run(...)")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for crash in CRASHES:
        terminalreporter.write_line(f"run again, since a rank ended in native code: {crash}", yellow=True)
