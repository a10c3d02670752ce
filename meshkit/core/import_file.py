"""A user's Python file as a module, as `file.py:function` names it."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType


def import_file(path: Path) -> ModuleType:
    """Imported once by a process, unless the file has changed.

    Raises: ImportError with what the file raised, or `exit()` in a script without a guard; OSError without the file.
    """
    path = path.resolve()
    return _imported(path, path.stat().st_mtime_ns)


@cache
def _imported(path: Path, modified_ns: int) -> ModuleType:
    name = "_".join(("file", *path.with_suffix("").parts[1:]))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up their annotations
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ImportError(f"{type(error).__name__}: {error}") from error
    return module
