"""Paths in flags: `~` is the home, and a folder that cannot be written to is refused at once, not minutes later."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from meshkit.errors import DataError


def at_home(flag: str, value: Any) -> Any:
    """The value of a flag, paths in it without `~`, which a shell leaves in `--out=~/runs` and in a file of flags.

    Raises: DataError for the home of a user who is not there.
    """
    if isinstance(value, tuple):
        return tuple(at_home(flag, each) for each in value)
    if not isinstance(value, Path):
        return value
    try:
        return value.expanduser()
    except RuntimeError:
        name = flag.replace("_", "-")
        raise DataError(f"--{name} {value}: no user is called {value.parts[0][1:]}. Give the whole path.") from None


def refuse_folder(flag: str, folder: Path) -> None:
    """Changes nothing. Raises: DataError where no folder can be: a file stands there, or what it is in cannot be written."""
    folder = folder.expanduser().absolute()
    # lexists: a link that leads nowhere, or to itself, is there too.
    there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not there.is_dir():
        kind = "a link that leads nowhere" if there.is_symlink() else "a file"
        which = f"is {kind}" if there == folder else f"would be in {there}, which is {kind}"
        raise DataError(f"--{flag} {folder} {which}. Give a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise DataError(f"--{flag} {folder}: {there} cannot be written. Give a folder that can.")


def make_folder(flag: str, folder: Path) -> Path:
    """The folder, which is there then. Raises: DataError where the system does not make it."""
    refuse_folder(flag, folder)
    try:
        folder.expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"--{flag} {folder}: the system does not make it: {error.strerror}. Give another folder."
        ) from None
    return folder.expanduser()
