"""Tests that take turns all have theirs, and each day some do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.turns import PART_S, ROUND, costs, days_of, has_turn, take_turns, turn

DAYS, EVERY = range(20_000, 20_008), 4


@pytest.mark.parametrize("cells", [1, 3, 4, 10])
def test_each_cell_has_its_turn_once_in_a_round(cells: int) -> None:
    for first in DAYS[:-EVERY]:
        days = [
            {cell for cell in range(cells) if has_turn("a.py::b", cell, EVERY, day=first + n)} for n in range(EVERY)
        ]
        assert sorted(cell for day in days for cell in day) == list(range(cells))
        assert cells < EVERY or all(days)


def test_the_day_is_said_or_the_commit_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHKIT_TEST_TURN", "7")
    assert turn() == 7
    monkeypatch.setenv("MESHKIT_TEST_TURN", "commit")
    assert turn() is not None
    monkeypatch.delenv("MESHKIT_TEST_TURN")
    assert turn() is None


def test_marked_tests_of_other_days_are_left_out() -> None:
    def item(name: str, *marks: pytest.Mark) -> Any:
        return SimpleNamespace(nodeid=name, get_closest_marker=lambda kind: next(iter(marks), None))

    dear = pytest.mark.turns(2).mark
    items = [item("a.py::b[0]", dear), item("a.py::cheap"), item("a.py::b[1]", dear)]
    told = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    for day in (0, 1):
        left = list(items)
        take_turns(told, left, day)  # type: ignore[arg-type]
        assert len(left) == 2 and items[1] in left
    left = list(items)
    take_turns(told, left, None)  # type: ignore[arg-type]
    assert left == items


def test_dear_files_come_in_so_many_days_that_a_days_part_is_small() -> None:
    assert days_of("tests/not_there_yet.py") == 1
    for file, seconds in costs().items():
        days = days_of(file)
        assert days == ROUND or seconds / days <= PART_S
        assert days == 1 or seconds / (days / 2) > PART_S


def test_costs_are_of_files_that_are_there() -> None:
    root = Path(__file__).parents[1]
    assert [file for file in costs() if not (root / file).is_file()] == []
