"""Documents of a corpus: one reader for each kind of file; errors name file and line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text to learn from. `source` names it, the same on every machine; `file_bytes` is its part of its file."""

    text: str
    source: str
    file_bytes: int


def read_file(path: Path, *, name: str, field: str) -> Iterator[Document]:
    """The documents of one file, in file order; a document without any text is left out.

    name: what the file is called in `Document.source`. field: the JSONL key or Parquet column that holds the text.
    Raises: DataError naming the file and, where there is one, the line or row.
    """
    try:
        yield from READERS[path.suffix](path, name, field)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path}: cannot be read: {reason}. Check the path and its permissions.") from None


def _read_text(path: Path, name: str, field: str) -> Iterator[Document]:
    # Not read_text, which turns \r\n into \n: the text is what the file holds, and its bytes are counted.
    raw = path.read_bytes()
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} line {line}: not UTF-8. Convert the file or leave it out.") from None
    if text:
        yield Document(text=text, source=name, file_bytes=len(raw))


def _read_jsonl(path: Path, name: str, field: str) -> Iterator[Document]:
    # [Note: lines are read as bytes]
    # In text mode a byte that is not UTF-8 raises while the file is iterated, for a buffer of many lines, and nothing
    # says which; str.splitlines would also cut at U+2028 and U+0085, which JSON strings may hold unescaped.
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.isspace():
                continue
            text = _text_of_line(raw, f"{path} line {number}", field)
            if text:
                yield Document(text=text, source=f"{name}:{number}", file_bytes=len(raw))


def _text_of_line(raw: bytes, where: str, field: str) -> str:
    row = object_of_line(raw, where)
    if field not in row:
        raise DataError(f"{where}: has no field {field!r}, only {sorted(row)}. Name the field that holds the text.")
    return _checked_text(row[field], where, field)


def object_of_line(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object in a line of JSONL."""
    try:
        row = json.loads(raw.decode())
    except UnicodeDecodeError:
        raise DataError(f"{where}: not UTF-8. Convert the file or drop the line.") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}. Write one object per line.") from None
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{where}: {error}. Drop the line.") from None
    except RecursionError:
        raise DataError(f"{where}: JSON that is nested too deeply to be read. Drop the line.") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: holds a JSON {type(row).__name__}, not an object. Write one object per line.")
    return row


def _checked_text(value: object, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {field!r} is {type(value).__name__}, not text. Name the field that holds the text.")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON may escape half of a surrogate pair, which no tokenizer can encode
        raise DataError(f"{where}: {field!r} holds a lone surrogate, which is not text. Drop the line.") from None
    return value


def _read_parquet(path: Path, name: str, field: str) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow. Run: pip install 'meshkit[parquet]'.") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if field not in columns:
                raise DataError(
                    f"{path}: has no column {field!r}, only {sorted(columns)}. Name the column that holds the text."
                )
            # Columns are compressed together, so a row has no size of its own: an equal share, for the progress bar.
            row_bytes = path.stat().st_size // max(1, file.metadata.num_rows)
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    text = _checked_text(value, f"{path} row {number}", field)
                    if text:
                        yield Document(text=text, source=f"{name}:{number}", file_bytes=row_bytes)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}. Write it again or leave it out.") from None


READERS: dict[str, Callable[[Path, str, str], Iterator[Document]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".py": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
