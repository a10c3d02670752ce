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
        """After the forward: what it added, replaced or took out. What it left is what was given, and is not written."""
        for own, copy in self._pairs:
            before, after = _named(own), {key: self._own(value) for key, value in _named(copy).items()}
            changed = {key: value for key, value in after.items() if key not in before or before[key] is not value}
            if isinstance(own, list | deque):
                if changed or len(before) != len(after):
                    own.clear()
                    own.extend(after.values())
            elif isinstance(own, dict):
                for key in before.keys() - after.keys():
                    del own[key]
                for key, value in changed.items():
                    own[key] = value
            else:
                for name, value in changed.items():
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
        one, other = _named(given), _named(made)
        for key in one.keys() & other.keys():
            self._match(one[key], other[key])


def _named(held: Any) -> dict[Any, Any]:
    """What is in it, by place, key or field."""
    if isinstance(held, tuple | list | deque):
        return dict(enumerate(held))
    return dict(held) if isinstance(held, dict) else _fields(held)


def _fields(held: Any) -> dict[str, Any]:
    """Of a dataclass; none of anything else."""
    if not dataclasses.is_dataclass(held) or isinstance(held, type):
        return {}
    return {field.name: getattr(held, field.name) for field in dataclasses.fields(held) if hasattr(held, field.name)}
