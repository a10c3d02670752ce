"""Files of users, imported by their path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshkit.core.import_file import import_file

DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Row:
    number: int = {}
"""


def test_a_file_with_a_dataclass_is_imported_once_until_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(DATACLASS.format(1))
    first = import_file(path)
    assert first.Row().number == 1 and import_file(path) is first
    path.write_text(DATACLASS.format(2))
    os.utime(path, ns=(0, 1))  # another moment, however coarse the clock of the files is
    assert import_file(path).Row().number == 2


@pytest.mark.parametrize(
    ("text", "said"), [("1 / 0", "ZeroDivisionError"), ("exit(3)", "SystemExit: 3"), ("(", "Syntax")]
)
def test_what_a_file_raises_is_an_import_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(text)
    with pytest.raises(ImportError, match=said):
        import_file(path)
