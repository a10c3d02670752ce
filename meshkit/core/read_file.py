"""Reading a small file that somebody gave: no pipe that is waited for, no folder, no device, and JSON that is an object."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from meshkit.core.digests import DIGESTS, FORMAT
from meshkit.errors import MeshkitError

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def read_text(path: Path, error: type[MeshkitError], *, advice: str = "Write it again.") -> str:
    """The text of a file in UTF-8. Raises: `error`, of one line, for anything else than such a file."""
    try:
        # Without O_NONBLOCK to open a pipe waits for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise error(f"{path} does not exist. {advice}") from None
    except (OSError, ValueError) as failure:  # ValueError: a zero byte in the name
        raise error(f"{path} cannot be read: {getattr(failure, 'strerror', None) or failure}. {advice}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise error(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, not a file. {advice}")
    with os.fdopen(descriptor, "rb") as file:
        try:
            text = file.read().decode()
        except OSError as failure:
            raise error(f"{path} cannot be read: {failure.strerror}. {advice}") from None
        except UnicodeDecodeError as failure:
            raise error(f"{path} is not UTF-8 at byte {failure.start}. {advice}") from None
    if path.name != DIGESTS and text.startswith("{") and f'"{FORMAT}"' in text[:80]:
        raise error(f"{path} holds the digests of other files, under a name that is not theirs. {advice}")
    return text


def read_json_object(path: Path, error: type[MeshkitError], *, advice: str = "Write it again.") -> dict[str, Any]:
    """The object in a JSON file. Raises: `error`, of one line, for anything else."""
    text = read_text(path, error, advice=advice)
    try:
        content = json.loads(text)
    except RecursionError:
        raise error(f"{path} is JSON that is nested too deeply to be read. {advice}") from None
    except ValueError as failure:
        raise error(f"{path} is not valid JSON: {failure}. {advice}") from None
    if not isinstance(content, dict):
        raise error(f"{path} holds a {type(content).__name__}, but must hold an object. {advice}")
    return content
