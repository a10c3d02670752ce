"""Rows into those that are learnt from and those that are only evaluated on."""

from __future__ import annotations

from collections.abc import Iterable

from meshkit.data.prepare import is_held_out
from meshkit.data.records import Record
from meshkit.data.standard_library_tasks import TaskSplits
from meshkit.errors import DataError


def split_records(records: Iterable[Record], *, held_out: float) -> TaskSplits:
    """Set aside part of the rows, by a hash of their sources: a row stays on its side whatever others come or go.

    Raises: DataError if one of the two halves would be empty.
    """
    halves: tuple[list[Record], list[Record]] = ([], [])
    for record in records:
        halves[is_held_out(record.source, held_out)].append(record)
    if not all(halves):
        raise DataError(
            f"held_out={held_out} leaves {len(halves[0])} rows to learn from and {len(halves[1])} to evaluate on, and both "
            "need one. Use more rows or another held_out."
        )
    return TaskSplits(train=halves[0], held_out=halves[1])
