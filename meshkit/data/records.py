"""Records: rows of JSONL, Parquet and Arrow files, and of folders that Hugging Face `datasets` saves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshkit.data.text.documents import object_of_line
from meshkit.errors import DataError

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A row of data. `source` names it, like chats.jsonl:17, the same on every machine."""

    fields: dict[str, Any]
    source: str


def read_records(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, split: str | None = None
) -> Iterator[Record]:
    """The rows of .jsonl, .parquet and .arrow files, and of folders, in order; the files of a folder sorted by name.

    A folder is what `datasets` saved with save_to_disk, or else any that holds such files, at any depth.
    split: one of the splits of a folder. Arrow and Parquet write null for each key that only other rows have; such keys
    inside of a field are left out.
    Raises: DataError naming file and line for what is missing or cannot be read, and if there are no rows at all.
    """
    path_list = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    empty = True
    for path in map(Path, path_list):
        for name, file in _files(path, split):
            try:
                for number, fields in _READERS[file.suffix](file):
                    empty = False
                    yield Record(fields=fields, source=f"{name}:{number}")
            except OSError as error:
                reason = error.strerror or error
                raise DataError(f"{file}: cannot be read: {reason}. Check the file and its permissions.") from None
    if empty:
        raise DataError(
            f"no rows in {', '.join(map(str, path_list)) or 'no paths'}. Name a file or folder that has some."
        )


def encode_records(records: Iterator[Record] | Sequence[Record], encode: Callable[[Record], Result]) -> list[Result]:
    """`encode` of each record, in order; an error names the record it came from.

    `encode_records(read_records("chats.jsonl"), lambda record: encode_chat(chat, record.fields["messages"]))`
    Raises: DataError, with the source in front, for a field that is not there too.
    """
    results = []
    for record in records:
        try:
            results.append(encode(record))
        # An encoder reads row fields by name without checks of its own: a KeyError is a field that the row lacks.
        except KeyError as error:
            has = sorted(record.fields)
            raise DataError(
                f"{record.source}: has no field {error}, only {has}. Name the field that holds it."
            ) from None
        except DataError as error:
            text = str(error)
            # An encoder that was handed the source has named it already.
            raise DataError(text if text.startswith(record.source) else f"{record.source}: {text}") from None
    return results


def _files(path: Path, split: str | None) -> list[tuple[str, Path]]:
    """(name, path) of each file of rows that a path stands for."""
    kinds = ", ".join(_READERS)
    if path.is_file():
        if path.suffix not in _READERS:
            raise DataError(f"{path}: cannot read a file of this kind. Give one of {kinds}, or a folder of a data set.")
        return [(path.name, path)]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder. Check the path; relative ones start at {Path.cwd()}.")
    # save_to_disk of a DatasetDict writes dataset_dict.json beside a folder for each split; that of a Dataset writes
    # state.json beside the files.
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits", [])
        if split not in splits:
            problem = "no split was named" if split is None else f"has no split {split!r}"
            raise DataError(f"{path}: {problem}. Give split=, one of {splits}.")
        return [(f"{split}/{name}", file) for name, file in _saved(path / str(split))]
    if (path / "state.json").is_file():
        return _saved(path)
    files = sorted(file for file in path.rglob("*") if file.suffix in _READERS and file.is_file())
    if not files:
        raise DataError(f"{path}: holds no file of rows. Give files of one of {kinds}, or a saved data set.")
    return [(file.relative_to(path).as_posix(), file) for file in files]


def _saved(folder: Path) -> list[tuple[str, Path]]:
    """The Arrow files of a data set that `datasets` saved, in the order it names them."""
    # state.json names the files in the order of rows. Beside them `datasets` may have left caches (cache-*.arrow),
    # which are no part of the data.
    names = [entry["filename"] for entry in _json(folder / "state.json").get("_data_files", [])]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        problem = f"lacks {missing}" if missing else "names no files"
        raise DataError(f"{folder}: not a whole saved data set: it {problem}. Save it again with save_to_disk.")
    return [(name, folder / name) for name in names]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}. Save the data set again.") from None
    return value if isinstance(value, dict) else {}


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    # See [Note: lines are read as bytes] in text/documents.py.
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.isspace():
                yield number, object_of_line(raw, f"{path} line {number}")


def _read_arrow(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """.parquet, and .arrow in the stream format that `datasets` writes or the file format."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading it needs pyarrow. Run: pip install 'meshkit[parquet]'.") from None
    number = 0
    try:
        if path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                # Few rows at a time: to_pylist makes Python objects, which take many times the memory of their
                # columns. Rows are counted over batches, so a row's name does not depend on how the file was cut.
                for batch in file.iter_batches(batch_size=256):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, {name: _without_null(value) for name, value in row.items()}
        else:
            with path.open("rb") as raw:
                # Both formats are called .arrow, and only the file format begins with its magic bytes.
                is_file = raw.read(6) == b"ARROW1"
                raw.seek(0)
                reader = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(raw)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
                for batch in batches:
                    for row in batch.to_pylist():
                        number += 1
                        yield number, {name: _without_null(value) for name, value in row.items()}
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not readable after row {number}: {error}. Write it again or leave it out.") from None


# A column of Arrow has one type: a key that any row's message has is null in all others, and a chat template that
# asks `is defined` would take null for a value. Nulls inside of lists are elements and stay.
def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, dict[str, Any]]]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_arrow,
    ".arrow": _read_arrow,
}
