"""Which code a row measured: the files of meshkit that ran in a step, and a digest of what they say to Python."""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def code_of(files: Sequence[str]) -> dict[str, Any]:
    """For a row."""
    return {"files": list(files), "digest": digest(files)}


def is_fresh(row: dict[str, Any]) -> bool:
    """Whether what the row measured is still what the files say; comments and docstrings are free to change."""
    return bool(row["code"]["digest"] == digest(row["code"]["files"]))


def digest(files: Sequence[str], root: Path = ROOT) -> str:
    texts = [f"{name}\n{_code(path.read_text()) if (path := root / name).exists() else ''}" for name in sorted(files)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@cache  # rows name much of the same code
def _code(source: str) -> str:
    """Without comments, docstrings and empty lines: by places in the text, which are the same for any version of Python."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                for line in range(first.lineno, (first.end_lineno or first.lineno) + 1):
                    lines[line - 1] = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())
