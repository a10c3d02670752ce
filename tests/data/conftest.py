"""Token files for the tests of the data package."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from meshkit.data import Tokenizer, Tokens, train_tokenizer

TEXT = "def law(x):\n    return x  # every mesh, every seed: naïve 東京 🙂\n" * 40


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level BPE of 300 ids."""
    return train_tokenizer([TEXT], vocab_size=300)


@pytest.fixture(scope="session")
def make_tokens() -> Callable[..., Tokens]:
    """Tokens in memory, from documents that are lists of ids."""

    def make(documents: list[list[int]], *, vocab_size: int = 1 << 16, fingerprint: str = "made") -> Tokens:
        return Tokens(
            path=Path("made.tokens"),
            ids=np.array([token for document in documents for token in document], dtype=np.uint16),
            offsets=np.array([0, *accumulate(len(document) for document in documents)], dtype=np.int64),
            vocab_size=vocab_size,
            fingerprint=fingerprint,
            text_bytes=None,
        )

    return make
