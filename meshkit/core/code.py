"""What makes a function the same one again, although it is made anew in every step."""

from __future__ import annotations

from functools import partial
from typing import Any


def code_of(function: Any) -> Any:
    """The code of a function or method, and of what a partial, or anything else with a `func`, calls."""
    function = getattr(function, "func", function)
    function = function.func if isinstance(function, partial) else function
    return getattr(getattr(function, "__func__", function), "__code__", None) or type(function)
