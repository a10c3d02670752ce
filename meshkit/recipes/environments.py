"""Environments of reinforcement learning recipes: by name, or of a user's own file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from meshkit.algos.environments import Calculator, Environment, GuessingGame
from meshkit.core.import_file import import_file
from meshkit.errors import DataError

ENVIRONMENTS: dict[str, Callable[[], Environment]] = {"calculator": Calculator, "guessing": GuessingGame}
"""by the names that recipes have for them"""


@dataclass
class FileEnvironment:
    """`file.py:Class`, which other processes import anew. It has the class's `reset` and `step`."""

    file: str
    name: str

    def __post_init__(self) -> None:
        self.inner: Any = _class_of(self.file, self.name)()

    def __getattr__(self, name: str) -> Any:
        if name not in ("reset", "step"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getstate__(self) -> tuple[str, str, dict[str, Any]]:
        return (
            self.file,
            self.name,
            vars(self.inner),
        )  # not the class, which only this process has imported by this name

    def __setstate__(self, state: tuple[str, str, dict[str, Any]]) -> None:
        self.file, self.name, values = state
        made = _class_of(self.file, self.name)
        self.inner = made.__new__(made)
        vars(self.inner).update(values)


def _class_of(file: str, name: str) -> Any:
    try:
        module = import_file(Path(file))
    except ImportError as error:
        raise DataError(f"--environment {file}: cannot be imported: {error}.") from error
    found = getattr(module, name, None)
    if not callable(found) or not all(hasattr(found, method) for method in ("reset", "step")):
        raise DataError(f"--environment {file}:{name}: the file has no class {name!r} with reset and step.")
    return found


def environment_of(word: str) -> Callable[[], Environment]:
    """Of --environment: a name of ENVIRONMENTS or `file.py:Class`. Raises: DataError for others."""
    if word in ENVIRONMENTS:
        return ENVIRONMENTS[word]
    file, _, name = word.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise DataError(
            f'--environment {word}: neither one of {", ".join(ENVIRONMENTS)} nor "file.py:Class" of a file that exists.'
        )
    _class_of(file, name)
    return partial(FileEnvironment, file, name)
