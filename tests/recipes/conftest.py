"""What tests of recipes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.launch import write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl")
