"""Token files: documents as ids, written once, memory-mapped by every rank.

One file: a header of 4096 bytes (one line of JSON, padded with spaces; `head -n 1` shows it), the raw little-endian
ids, zeros up to a multiple of 8, and documents + 1 int64 offsets. Document d is ids[offsets[d]:offsets[d + 1]].
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from meshkit.core.digests import digest_json
from meshkit.core.full_disk import telling_of_a_full_disk
from meshkit.data.text.tokenizer import Tokenizer
from meshkit.errors import DataError

# A page: ids begin aligned, and the header can be written last, over zeros, when digest and counts are known.
HEADER_BYTES = 4096
FORMAT = "meshkit tokens 2"
OLDER = "meshkit tokens 1"
"""without the digest of the header: read as before, and not written any more"""
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_FIELDS = {
    "format": str,
    "dtype": str,
    "tokens": int,
    "documents": int,
    "vocab_size": int,
    "tokenizer": str,
    "text_bytes": int,
    "sha256": str,
}
_DIGEST = "header"
"""the field with the digest of all others; "sha256" is that of ids and offsets"""
_CHUNK = 1 << 24
"""ids looked at together when a whole file is read"""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """An open token file. `ids` [tokens] and `offsets` [documents + 1] stay on disk until they are read."""

    path: Path
    ids: np.ndarray
    offsets: np.ndarray
    vocab_size: int
    """every id is below it"""
    fingerprint: str
    """the content: equal for equal ids and offsets, wherever the file lies"""
    text_bytes: int | None
    """UTF-8 bytes of the text; None for an .npy file, which does not say"""

    @property
    def documents(self) -> int:
        """How many documents."""
        return len(self.offsets) - 1


def open_tokens(path: str | os.PathLike[str], *, tokenizer: Tokenizer | None = None) -> Tokens:
    """Map a token file, checking its header, its size and its offsets, but not yet its ids.

    tokenizer: the one that will be used with the file.
    Raises: DataError if the file is missing, of another kind, truncated, empty, or made with another tokenizer.
    """
    path = Path(path)
    header = _read_header(path)
    dtype, count, documents = DTYPES[header["dtype"]], header["tokens"], header["documents"]
    if count < 1:
        raise DataError(f"{path}: holds no tokens. Delete it and build it again from a corpus with text.")
    if tokenizer is not None and tokenizer.fingerprint != header["tokenizer"]:
        raise DataError(
            f"{path}: made with tokenizer {header['tokenizer'][:12]} of {header['vocab_size']} ids, but the tokenizer "
            f"given is {tokenizer.fingerprint[:12]} of {tokenizer.vocab_size} ids. "
            "Give the tokenizer the file was made with, or build the file again."
        )
    offsets_at = HEADER_BYTES + -(-count * dtype.itemsize // 8) * 8
    size, expected = path.stat().st_size, offsets_at + 8 * (documents + 1)
    if size != expected:
        raise DataError(
            f"{path}: has {size} bytes, but {count} tokens in {documents} documents take {expected}: "
            f"it is {'truncated' if size < expected else 'too long'}. Delete it and build it again."
        )
    offsets = np.memmap(path, dtype="<i8", mode="r", offset=offsets_at)
    if offsets[0] != 0 or offsets[-1] != count or (np.diff(offsets) < 0).any():
        raise DataError(f"{path}: its document offsets do not run from 0 to {count}. Delete it and build it again.")
    return Tokens(
        path=path,
        ids=np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(count,)),
        offsets=offsets,
        vocab_size=header["vocab_size"],
        fingerprint=header["sha256"],
        text_bytes=header["text_bytes"],
    )


def open_npy(path: str | os.PathLike[str], *, vocab_size: int, eos_id: int) -> Tokens:
    """Map an .npy file of ids, [tokens] of any integer type; a document ends with each `eos_id`.

    Reads the whole file once, to find the documents and to check every id.
    Raises: DataError if it is not such a file, holds no tokens, or has an id outside the vocabulary.
    """
    path = Path(path)
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable .npy file: {error}. Write it with numpy.save.") from None
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        content = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else "an archive"
        raise DataError(f"{path}: holds {content}, not one row of integer ids. Save a 1-D integer array.")
    if len(ids) == 0:
        raise DataError(f"{path}: holds no tokens. Save at least one document.")
    sha256, ends = hashlib.sha256(), [np.zeros(1, dtype=np.int64)]
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        check_range(chunk, vocab_size, str(path), start)
        sha256.update(chunk.tobytes())
        ends.append(start + 1 + np.flatnonzero(chunk == eos_id))
    offsets = np.concatenate(ends)
    # What follows the last eos is a document that nobody ended.
    if offsets[-1] != len(ids):
        offsets = np.append(offsets, len(ids))
    sha256.update(offsets.tobytes())
    return Tokens(
        path=path, ids=ids, offsets=offsets, vocab_size=vocab_size, fingerprint=sha256.hexdigest(), text_bytes=None
    )


def read_ids(tokens: Tokens, start: int, stop: int) -> np.ndarray:
    """int64 ids [min(stop, tokens) - start], each checked to be in the vocabulary.

    Raises: DataError naming file and position of an id that is not; a damaged file must not index an embedding.
    """
    ids = np.asarray(tokens.ids)[start:stop]  # a slice of a map is another map, which takes longer to make
    check_range(ids, tokens.vocab_size, str(tokens.path), start)
    # A copy: the map is read-only, embeddings index by int64, and torch has few operations on unsigned integers.
    return ids.astype(np.int64)


def verify_tokens(tokens: Tokens) -> None:
    """Read a whole token file and compare it with the digest in its header.

    Raises: DataError if one bit differs from what was written, or for an id outside the vocabulary, with its position.
    """
    sha256 = hashlib.sha256()
    for start in range(0, len(tokens.ids), _CHUNK):
        chunk = tokens.ids[start : start + _CHUNK]
        check_range(chunk, tokens.vocab_size, str(tokens.path), start)
        sha256.update(chunk.tobytes())
    sha256.update(tokens.offsets.tobytes())
    if sha256.hexdigest() != tokens.fingerprint:
        raise DataError(
            f"{tokens.path}: its content is not what was written: the digest differs. Delete it and build it again."
        )


def check_range(ids: np.ndarray, vocab_size: int, where: str, start: int = 0) -> None:
    """Raises: DataError for the first id outside the vocabulary. where: what holds `ids`; start: position of ids[0]."""
    if len(ids) and ((ids.dtype.kind == "i" and ids.min() < 0) or ids.max() >= vocab_size):
        index = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise DataError(
            f"{where}: id {ids[index]} at position {start + index} is outside the vocabulary of {vocab_size}. "
            "Build the file again with the right tokenizer, or give the right vocabulary size."
        )


def _read_header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Check the path, or build the file.") from None
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") not in (FORMAT, OLDER):
        raise DataError(f"{path}: not a token file: its first {HEADER_BYTES} bytes are no {FORMAT!r} header.")
    digest = header.pop(_DIGEST, None) if header["format"] == FORMAT else digest_json(header)
    is_complete = header.keys() == _FIELDS.keys() and all(
        isinstance(header[name], kind) for name, kind in _FIELDS.items()
    )
    if not is_complete or header["dtype"] not in DTYPES or digest != digest_json(header):
        said = raw.decode(errors="replace").rstrip()
        raise DataError(f"{path}: its header is damaged: {said[:300]}. Delete it and build it again.")
    return header


# Atomic writing: a killed build leaves nothing that could be taken for a token file.


class TokenWriter:
    """Write a token file, document by document, in a `with` block.

    The file gets its name only when the block ends well; until then it is `NAME.PID.partial`, without a header, so a
    killed build leaves nothing that could be taken for a token file.
    Raises: DataError for an id outside the vocabulary and for a file without tokens.
    """

    def __init__(self, path: str | os.PathLike[str], *, vocab_size: int, tokenizer: str) -> None:
        path = Path(path)
        self._path = path
        self._partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        # 8 bytes a document, where a list of integers takes about 40.
        self._offsets = array("q", [0])
        self._text_bytes = 0
        self._sha256 = hashlib.sha256()

    def __enter__(self) -> TokenWriter:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._partial.open("wb")
        # Zeros are no header: until `_finish` this is no token file under whatever name.
        self._file.write(bytes(HEADER_BYTES))
        return self

    @property
    def documents(self) -> int:
        """How many documents were added."""
        return len(self._offsets) - 1

    def add(self, ids: np.ndarray, *, text_bytes: int = 0) -> None:
        """Append one document. ids: [length] integers, bos and eos included."""
        check_range(ids, self._vocab_size, f"{self._path} document {self.documents}")
        raw = ids.astype(DTYPES[self._dtype]).tobytes()
        with self._telling():
            self._file.write(raw)
        self._sha256.update(raw)
        self._offsets.append(self._offsets[-1] + len(ids))
        self._text_bytes += text_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Around closing too, which writes what Python still holds.
            with self._telling(), self._file:
                if kind is None:
                    self._finish()
            if kind is None:
                os.replace(self._partial, self._path)  # atomic: a reader sees the old file, none, or all of the new one
        finally:
            self._partial.unlink(missing_ok=True)

    def _telling(self) -> AbstractContextManager[None]:
        so_far = HEADER_BYTES + self._offsets[-1] * DTYPES[self._dtype].itemsize + 8 * len(self._offsets)
        return telling_of_a_full_disk(DataError, f"writing {self._path} so far", self._path.parent, so_far)

    def _finish(self) -> None:
        tokens = self._offsets[-1]
        if tokens == 0:
            raise DataError(f"{self._path}: no tokens to write. Add at least one document.")
        offsets = np.array(self._offsets, dtype="<i8").tobytes()
        self._sha256.update(offsets)
        self._file.write(bytes(-self._file.tell() % 8))  # offsets are int64, and are mapped aligned
        self._file.write(offsets)
        header = {
            "format": FORMAT,
            "dtype": self._dtype,
            "tokens": tokens,
            "documents": self.documents,
            "vocab_size": self._vocab_size,
            "tokenizer": self._tokenizer,
            "text_bytes": self._text_bytes,
            "sha256": self._sha256.hexdigest(),
        }
        self._file.seek(0)
        header[_DIGEST] = digest_json(header)
        self._file.write(json.dumps(header).encode().ljust(HEADER_BYTES - 1) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # the bytes are on disk before the name is
