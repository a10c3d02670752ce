"""What a function holds (closures, defaults, arguments of a partial, attributes, globals): whether it is the same again."""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

_MOST = 512  # values that are looked at
_SMALL = 16  # entries of a container that is compared by what it has
_KINDS = 32  # of one code, that are all judged
_ALWAYS = 4  # changes of numbers alone, that are all judged
_KEPT = 16

# [Note: which changes make a function another one]
# Texts, flags, types, code, and whether a number is negative, zero, one or another, are its kind: another kind is judged, as
# reduction="mean" after reduction="sum". Numbers, tensors and other objects may be others in each step (a weight that is
# annealed, a baseline), and a judgement in each would cost more than the step: of these changes the first four are judged,
# and then the 8th, 16th, and so on. So a change that stays is judged at last, after no more steps than there were changes
# before it. Objects are told apart by weak references to what was judged, not by `id`, which a later object may have:
# all ranks find the same.


@dataclass(frozen=True, eq=False)
class Held:
    """kind: what is compared by value. changing: numbers, and references to objects."""

    kind: tuple[Hashable, ...]
    changing: tuple[Any, ...]

    def is_same(self, other: Held) -> bool:
        return (
            self.kind == other.kind
            and len(self.changing) == len(other.changing)
            and all(map(_is_same, self.changing, other.changing))
        )


@dataclass(eq=False)
class Judged:
    """What functions of one code have held when they were judged."""

    kinds: set[tuple[Hashable, ...]] = field(default_factory=set)
    last: deque[Held] = field(default_factory=lambda: deque(maxlen=_KEPT))
    changes: int = 0

    def is_due(self, held: Held) -> bool:
        """Whether it must be judged. See [Note: which changes make a function another one]."""
        if any(each.is_same(held) for each in self.last):
            return False
        if self.kinds and not all(math.isfinite(each) for each in held.changing if isinstance(each, float)):
            return False  # a step that goes wrong: of it a trial would show nothing
        if held.kind not in self.kinds and len(self.kinds) < _KINDS:
            return True
        self.changes += 1
        return self.changes <= _ALWAYS or not self.changes & (self.changes - 1)

    def add(self, held: Held) -> None:
        if len(self.kinds) < _KINDS:
            self.kinds.add(held.kind)
        self.last.append(held)


def held_values(*functions: Any) -> Held:
    """What they hold now."""
    kind: list[Hashable] = []
    changing: list[Any] = []
    rest, seen = list(reversed(functions)), set[int]()
    while rest and len(kind) < _MOST:
        value = rest.pop()
        if isinstance(value, str | bytes | bool | None | enum.Enum | torch.dtype | torch.device | type | CodeType):
            kind.append((type(value), value))
            continue
        if isinstance(value, int | float):
            kind.append((type(value), "number", _sign(value)))
            changing.append(value)
            continue
        kind.append(_kind(value))
        if id(value) in seen:
            continue
        seen.add(id(value))
        parts = _parts(value)
        if parts is not None:
            rest += reversed(parts)
        elif (referred := _ref(value)) is not None:
            changing.append(referred)
    return Held(tuple(kind), tuple(changing))


def _sign(number: float) -> float:
    """Itself where it is -1, 0 or 1, which choose; else on which side."""
    return float(number) if number in (-1, 0, 1) else -2.0 if number < 0 else 2.0


def _kind(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.ndim
    if isinstance(value, nn.Module):
        return type(value), value.training
    if isinstance(value, BuiltinFunctionType):
        return type(value), value.__qualname__
    if isinstance(value, ModuleType):
        return type(value), value.__name__
    if isinstance(value, dict):
        return type(value), tuple(key for key in value if isinstance(key, str)) if len(value) <= _SMALL else ()
    return type(value), len(value) if isinstance(value, tuple) else 0


def _parts(value: Any) -> list[Any] | None:
    """Of what is compared by its parts; None for what is told apart as an object."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, FunctionType):
        cells = [each for cell in value.__closure__ or () for each in contents_of(cell)]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        named = [value.__globals__[name] for name in names_of(value.__code__) if name in value.__globals__]
        return [value.__code__, *cells, *defaults, *named]
    if isinstance(value, tuple | list):
        return [*value] if len(value) <= _SMALL else None
    if isinstance(value, dict):
        return [*value.values()] if len(value) <= _SMALL else None
    if isinstance(value, Tensor | nn.Module | ModuleType | BuiltinFunctionType) or not hasattr(value, "__dict__"):
        return None
    return [each for pair in vars(value).items() for each in pair]


def contents_of(cell: Any) -> list[Any]:
    """Of a closure's variable: one value, or none where it has none yet."""
    try:
        return [cell.cell_contents]
    except ValueError:  # not yet
        return []


def _ref(value: Any) -> Any:
    if isinstance(value, ModuleType | BuiltinFunctionType):
        return None
    try:
        return ref(value)
    except TypeError:  # a list, a dict, and other types of the language
        return None


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, ref) or isinstance(other, ref):
        return isinstance(one, ref) and isinstance(other, ref) and one() is not None and one() is other()
    return bool(one == other)


@lru_cache(maxsize=1024)
def names_of(code: CodeType) -> tuple[str, ...]:
    """Global names and attributes that a code has, and that of functions inside of it."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in names_of(each)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))
