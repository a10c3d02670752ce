"""What a module's forward is handed in place of the lists, dicts and dataclasses that it was called with: copies, whose
changes go back into the caller's own."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any


class Handed:
    """given, made: arguments, and the same of copies. Nothing public: FSDP2 and checkpoints rebuild what they take apart."""

    def __init__(self, given: Any, made: Any) -> None:
        self._pairs: list[tuple[Any, Any]] = []
        self._given: dict[int, Any] = {}  # by id of what stands for it
        self._made: list[Any] = []  # so that no id comes twice
        self._match(given, made)

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def write_back(self) -> None:
        """After the forward: what it added, replaced or took out. What it left is what was given."""
        for own, copy in self._pairs:
            if isinstance(own, list):
                own[:] = map(self._own, copy)
            elif isinstance(own, deque | dict):
                kept: Any = (
                    {key: self._own(value) for key, value in copy.items()}
                    if isinstance(copy, dict)
                    else list(map(self._own, copy))
                )
                own.clear()
                own.update(kept) if isinstance(own, dict) else own.extend(kept)
            else:
                for name, value in _fields(copy).items():
                    if (value := self._own(value)) is not getattr(own, name, None):
                        object.__setattr__(own, name, value)

    def _own(self, value: Any) -> Any:
        return self._given.get(id(value), value)

    def _match(self, given: Any, made: Any) -> None:
        if given is made or type(given) is not type(made):
            return
        self._given[id(made)] = given
        self._made.append(made)
        if not isinstance(given, tuple):
            if not (isinstance(given, list | deque | dict) or _fields(given)):
                return
            self._pairs.append((given, made))
        one, other = (_values(each) for each in (given, made))
        if len(one) == len(other):
            for before, after in zip(one, other, strict=True):
                self._match(before, after)


def _values(held: Any) -> list[Any]:
    if isinstance(held, tuple | list | deque):
        return list(held)
    return list((held if isinstance(held, dict) else _fields(held)).values())


def _fields(held: Any) -> dict[str, Any]:
    """Of a dataclass; none of anything else."""
    if not dataclasses.is_dataclass(held) or isinstance(held, type):
        return {}
    return {field.name: getattr(held, field.name) for field in dataclasses.fields(held) if hasattr(held, field.name)}
