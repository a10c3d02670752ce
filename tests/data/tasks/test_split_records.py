from __future__ import annotations

import pytest

from meshkit.data import Record, split_records
from meshkit.errors import DataError


def test_a_row_stays_on_its_side_when_others_come() -> None:
    rows = [Record(fields={"number": i}, source=f"rows.jsonl:{i}") for i in range(400)]
    some, all_ = split_records(rows[::2], held_out=0.25), split_records(rows, held_out=0.25)
    assert {row.source for row in some.held_out} == {row.source for row in all_.held_out} & {
        r.source for r in rows[::2]
    }
    assert [row.fields["number"] for row in all_.train] == sorted(row.fields["number"] for row in all_.train)
    assert len(all_.train) + len(all_.held_out) == 400 and 60 < len(all_.held_out) < 140


def test_a_half_without_rows_is_refused() -> None:
    rows = [Record(fields={}, source="rows.jsonl:1")]
    with pytest.raises(DataError, match="leaves 1 rows to learn from and 0 to evaluate on, and both need one"):
        split_records(rows, held_out=1e-9)


def test_few_rows_are_told_a_share_that_leaves_both_halves_one() -> None:
    rows = [Record(fields={}, source=f"mine.jsonl:{i}") for i in range(8)]
    with pytest.raises(DataError, match=r"Use more rows or another held_out, as (0\.\d+)\.") as refused:
        split_records(rows, held_out=1e-9)
    said = float(str(refused.value).rsplit("as ", 1)[1].rstrip("."))
    assert split_records(rows, held_out=said).held_out
