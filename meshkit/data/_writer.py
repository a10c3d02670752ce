"""Write token files so that a build that is killed leaves nothing that could be taken for one."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from pathlib import Path
from types import TracebackType

import numpy as np

from meshkit.data.tokens import DTYPES, FORMAT, HEADER_BYTES, check_range
from meshkit.errors import DataError


class TokenWriter:
    """Write a token file, document by document, in a `with` block.

    The file gets its name only when the block ends well; until then it is `NAME.PID.partial`, without a header, so a
    killed build leaves nothing that could be taken for a token file.
    Raises: DataError for an id outside the vocabulary and for a file without tokens.
    """

    def __init__(self, path: Path, *, vocab_size: int, tokenizer: str) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self._offsets = array("q", [0])
        self._text_bytes = 0
        self._sha256 = hashlib.sha256()

    def __enter__(self) -> TokenWriter:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._partial.open("wb")
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
        self._file.write(raw)
        self._sha256.update(raw)
        self._offsets.append(self._offsets[-1] + len(ids))
        self._text_bytes += text_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if kind is None:
                    self._finish()
            if kind is None:
                os.replace(self._partial, self._path)
        finally:
            self._partial.unlink(missing_ok=True)

    def _finish(self) -> None:
        tokens = self._offsets[-1]
        if tokens == 0:
            raise DataError(f"{self._path}: no tokens to write. Add at least one document.")
        offsets = np.array(self._offsets, dtype="<i8").tobytes()
        self._sha256.update(offsets)
        self._file.write(bytes(-self._file.tell() % 8))
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
        self._file.write(json.dumps(header).encode().ljust(HEADER_BYTES - 1) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())  # the bytes are on disk before the name is
