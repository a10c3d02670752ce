"""The table of drills in docs/faults.md has a row for each cell, and names functions that there are today."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

from tests.faults.table import PAGE, rows
from tests.faults.test_drill import CELLS

ROOT = Path(__file__).parents[2]


def test_every_drill_has_a_row() -> None:
    assert list(rows(PAGE.read_text())) == CELLS


def test_places_are_those_of_today() -> None:
    """Else `python -m tests.faults.table BLOCK` writes the rows of that block anew."""
    gone = []
    for (block, fault), row in rows(PAGE.read_text()).items():
        assert not re.search(r"\.py:\d", row), "a line's number, which any change of its file moves"
        for file, function in re.findall(r"(\w+\.py) in (\w+)", row):
            files = chain((ROOT / "meshkit").rglob(file), (ROOT / "tests").rglob(file))
            if not any(re.search(rf"def {function}\b", path.read_text()) for path in files):
                gone.append(f"{block} {fault}: {file} in {function}")
        for room in re.findall(r", ((?:[a-z_]+\.)+[a-z_]+), ", row):
            folder, _, name = room.replace(".", "/").rpartition("/")
            if not any((ROOT / "meshkit" / folder).glob(f"*{name}*")):
                gone.append(f"{block} {fault}: {room}")
    assert gone == []
