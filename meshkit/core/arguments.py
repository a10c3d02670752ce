"""Checking the kinds of the arguments that a public block is given (type checks, validation)."""

from __future__ import annotations

from types import NoneType
from typing import Any

from meshkit.errors import PlanError


def require(verb: str, argument: str, value: Any, *kinds: type) -> None:
    """Raises: PlanError unless the value is of one of the kinds; a wrong one would fail far below, as an AttributeError."""
    if isinstance(value, kinds):
        return
    wanted = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
    # The text of a module or of a tensor is many lines long.
    given = repr(value) if isinstance(value, str | int | float | NoneType) else f"a {type(value).__name__}"
    hint = " run.model is one." if type(value).__name__ == "Run" else ""
    if argument == "mesh":
        hint = " Make one by mk.init_mesh" + (", and pass its axis, as mesh['tp']." if verb != "parallelize" else ".")
    raise PlanError(f"{verb}({argument}={given}): give {wanted}.{hint}")
