"""Folders that a recipe writes to: refused at once, and not by the first write minutes later."""

from __future__ import annotations

import os
from pathlib import Path

from meshkit.errors import DataError


def refuse_folder(flag: str, folder: Path) -> None:
    """Changes nothing. Raises: DataError where no folder can be: a file stands there, or what it is in cannot be written."""
    folder = folder.expanduser().absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        which = "is a file" if there == folder else f"would be in {there}, which is a file"
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
