"""Rows come out of every kind of file as they were put in, and bad files are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from meshkit.data import Record, encode_records, read_records
from meshkit.errors import DataError

ROWS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": "naïve 🙂"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}],
        "n": 1,
    },
    {"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}], "n": 2},
]


def save_to_disk(folder: Path, parts: list[list[dict[str, Any]]]) -> None:
    """As `datasets` writes a data set: Arrow streams, and state.json that names them in order."""
    folder.mkdir(parents=True)
    schema = pyarrow.Table.from_pylist(ROWS).schema
    names = [f"data-{i:05d}-of-{len(parts):05d}.arrow" for i in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        with pyarrow.ipc.new_stream(folder / name, schema) as writer:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def fields(path: Path, **choices: Any) -> list[dict[str, Any]]:
    return [record.fields for record in read_records(path, **choices)]


def test_every_kind_of_file_gives_the_rows_back(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS[:1]) + "\n\n" + json.dumps(ROWS[1]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", pyarrow.Table.from_pylist(ROWS).schema) as writer:
        writer.write_table(pyarrow.Table.from_pylist(ROWS))
    save_to_disk(tmp_path / "saved", [ROWS[:1], ROWS[1:]])
    save_to_disk(tmp_path / "splits" / "train", [ROWS])
    save_to_disk(tmp_path / "splits" / "test", [ROWS[1:]])
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for name in ("a.jsonl", "a.parquet", "a.arrow", "saved"):
        assert fields(tmp_path / name) == ROWS, name
    assert fields(tmp_path / "splits", split="train") == ROWS
    assert fields(tmp_path / "splits", split="test") == ROWS[1:]
    assert [record.source for record in read_records(tmp_path / "a.jsonl")] == ["a.jsonl:1", "a.jsonl:3"]
    assert [record.source for record in read_records(tmp_path / "saved")][1] == "data-00001-of-00002.arrow:1"
    both = list(read_records([tmp_path / "a.jsonl", tmp_path / "a.parquet"]))
    assert [record.fields["n"] for record in both] == [1, 2, 1, 2]
    (tmp_path / "folder" / "b").mkdir(parents=True)
    (tmp_path / "folder" / "b" / "c.jsonl").write_text('{"n": 3}')
    (tmp_path / "folder" / "notes.txt").write_text("not rows")
    assert list(read_records(tmp_path / "folder")) == [Record(fields={"n": 3}, source="b/c.jsonl:1")]


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n[2]\n')
    (tmp_path / "bad.parquet").write_text("PAR1 no")
    (tmp_path / "bad.arrow").write_bytes(b"\xff\xff\xff\xff no")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "x.csv").write_text("a")
    (tmp_path / "none").mkdir()
    save_to_disk(tmp_path / "saved", [ROWS])
    (tmp_path / "saved" / "data-00000-of-00001.arrow").unlink()
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for name, text in [
        ("bad.jsonl", r"bad\.jsonl line 2: holds a JSON list, not an object\. Write one object per line"),
        ("bad.parquet", r"bad\.parquet: not readable after row 0: "),
        ("bad.arrow", r"bad\.arrow: not readable after row 0: "),
        ("empty.jsonl", r"no rows in .*empty\.jsonl\. Name a file or folder that has some"),
        ("x.csv", r"x\.csv: cannot read a file of this kind. Give one of \.jsonl, \.parquet, \.arrow, or a folder"),
        ("gone", "gone: no such file or folder. Check the path"),
        ("none", r"none: holds no file of rows. Give files of one of \.jsonl"),
        ("saved", r"saved: not a whole saved data set: it lacks \['data-00000-of-00001\.arrow'\]"),
        ("splits", r"splits: no split was named. Give split=, one of \['train'\]"),
    ]:
        with pytest.raises(DataError, match=text):
            fields(tmp_path / name)
    with pytest.raises(DataError, match=r"splits: has no split 'dev'. Give split=, one of \['train'\]"):
        fields(tmp_path / "splits", split="dev")


def test_errors_of_an_encoder_name_the_row() -> None:
    records = [Record(fields={"text": "x", "n": 1}, source="a.jsonl:1"), Record(fields={"n": 1}, source="a.jsonl:2")]
    with pytest.raises(
        DataError, match=r"^a\.jsonl:2: has no field 'text', only \['n'\]\. Name the field that holds it"
    ):
        encode_records(records, lambda record: record.fields["text"])

    def refuse(record: Record) -> None:
        raise DataError("no")

    with pytest.raises(DataError, match=r"^a\.jsonl:1: no$"):
        encode_records(records, refuse)
