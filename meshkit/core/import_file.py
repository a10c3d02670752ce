"""A user's Python file as a module, as `file.py:function` names it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from meshkit.errors import PlanError


def import_file(path: Path) -> ModuleType:
    """Imported once by a process, unless the file has changed.

    Raises: ImportError with what the file raised, or `exit()` in a script without a guard, and for one that is not called
    something.py; OSError without the file.
    """
    path = path.resolve()
    return _imported(path, path.stat().st_mtime_ns)


def import_function(word: str, *, asked: str) -> Callable[..., Any]:
    """Of `file.py:function`. asked: the flag, for errors.

    Raises: PlanError for a file that cannot be imported, or has no such function; OSError without the file.
    """
    file, _, name = word.rpartition(":")
    try:
        function = getattr(import_file(Path(file)), name, None)
    except ImportError as error:
        raise PlanError(f"{asked} {file}: cannot be imported: {error}.") from error
    if not callable(function):
        raise PlanError(f"{asked} {word}: the file has no function {name!r}.")
    found: Callable[..., Any] = function
    return found


@cache
def _imported(path: Path, modified_ns: int) -> ModuleType:
    name = "_".join(("file", *path.with_suffix("").parts[1:]))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("a Python file is called something.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up their annotations
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ImportError(f"{type(error).__name__}: {error}") from error
    return module
