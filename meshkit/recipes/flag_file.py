"""Flags in a file (config.toml): those that `--config` reads, and the resolved ones that a run keeps in its folder."""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from meshkit.core.read_file import read_text
from meshkit.errors import DataError

from .folders import at_home

FILE = "config.toml"
_ADVICE = "Give a TOML file of flags, as a run writes config.toml into its --out."


def with_file(args: Sequence[str], names: Collection[str]) -> list[str]:
    """The words of a command line, before them those that the file of `--config` stands for: of two, the later one holds.

    names: of all flags. Raises: DataError for a file that cannot be read, and for one with another name.
    """
    words = list(args)
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == "--config" and (equals or at + 1 < len(words)):
            return [*_words(at_home("config", Path(value if equals else words[at + 1])), names), *words]
    return words


def _words(path: Path, names: Collection[str]) -> list[str]:
    try:
        table = tomllib.loads(read_text(path, DataError, advice=_ADVICE))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"--config {path} is not TOML: {error}. Correct it.") from None
    words = []
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in names or name == "config":
            near = difflib.get_close_matches(name, [each for each in names if each != "config"], n=1)
            hint = f" Did you mean {near[0]}?" if near else " Remove it."
            raise DataError(f"--config {path} has {key!r}, which is no flag here.{hint}")
        flag = f"--{name.replace('_', '-')}"
        match value:
            case dict():
                raise DataError(f"--config {path}: {key} is a table. Give a value, as the flag {flag} takes it.")
            case bool():
                words.append(flag if value else f"--no-{flag.removeprefix('--')}")
            case list():
                words += [flag, *map(str, value)]
            case _:
                words += [f"{flag}={value}"]  # in one word, for a value may begin with a dash
    return words


def write_flags(config: Any, folder: Path, *, without: Collection[str] = ()) -> None:
    """Write the resolved flags of a run, which `--config` reads back. without: names of those that another file says."""
    table = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in {"config", *without} or (value is None and field.default is None):
            continue
        if isinstance(value, tuple | list):
            table[field.name] = [_plain(each) for each in value]
        else:
            table[field.name] = _plain(value)
    import tomli_w  # here, as in strategy/_toml.py

    partial = folder / f".{FILE}.{os.getpid()}.partial"
    partial.write_text(tomli_w.dumps(table), encoding="utf-8")
    os.replace(partial, folder / FILE)


def _plain(value: Any) -> Any:
    # TOML has no null; tyro reads the word.
    return value if isinstance(value, bool | int | float | str) else str(value)
