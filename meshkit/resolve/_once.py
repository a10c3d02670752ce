"""Memoised decisions: what strategies of one program decide alike (names, plans that are proved, stages) is decided once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from meshkit.errors import MeshkitError
from meshkit.program import Program, mode_of

Made = TypeVar("Made")
_MADE: WeakKeyDictionary[Program, dict[Hashable, Any]] = WeakKeyDictionary()


def once(program: Program, key: Hashable, make: Callable[[], Made]) -> Made:
    """`make()`, kept as long as the program. key: all that it depends on besides; what has no hash is made each time.

    A refusal is kept too, and raised again. Modes of modules are part of the key, for proofs depend on them.
    """
    mode = mode_of(program.model)
    try:
        known = _MADE.setdefault(program, {})
        found = (key, mode) in known
    except TypeError:
        return make()
    if not found:
        try:
            known[key, mode] = make()
        except MeshkitError as error:
            known[key, mode] = error
    made = known[key, mode]
    if isinstance(made, MeshkitError):
        raise made.with_traceback(None)
    result: Made = made
    return result
