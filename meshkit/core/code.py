"""A function's code: what makes it the same one again, although it is made anew in every step."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any


def code_of(function: Any) -> Any:
    """The code of a function or method, and of what a partial, or anything else with a `func`, calls."""
    function = getattr(function, "func", function)
    function = function.func if isinstance(function, partial) else function
    return getattr(getattr(function, "__func__", function), "__code__", None) or type(function)


def of_this_library(function: Any) -> bool:
    """Whether its code is a file of meshkit."""
    return str(getattr(code_of(function), "co_filename", "")).startswith(f"{Path(__file__).parents[1]}{os.sep}")


def is_ours(function: Any) -> bool:
    """Whether meshkit made it."""
    function = function.func if isinstance(function, partial) else function
    return str(getattr(function, "__module__", "")).startswith("meshkit.")
