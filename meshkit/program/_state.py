"""What a model keeps from call to call: what its modules hold beside parameters, buffers and modules."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Number
from typing import Any

from torch import nn

from meshkit.program._copy import is_record


@dataclass(frozen=True)
class Cell:
    """A place where a model keeps something beside parameters, buffers and modules: `owner[place]`. key: of the place."""

    key: tuple[str, ...]
    owner: Any
    place: Any

    @property
    def value(self) -> Any:
        return self.owner[self.place]

    @property
    def label(self) -> str:
        return ".".join(filter(None, self.key))


def state(model: nn.Module) -> dict[tuple[str, ...], Any]:
    """What modules hold beside parameters, buffers and modules, and what dicts and records hold that they have."""
    return {cell.key: view_of(cell.value) for cell in cells(model)}


def cells(model: nn.Module) -> Iterator[Cell]:
    seen: set[int] = set()
    for name, module in model.named_modules():
        for key in vars(module):
            if key not in _TABLES:
                yield from _cells_of(Cell((name, key), vars(module), key), seen)


def _cells_of(cell: Cell, seen: set[int]) -> Iterator[Cell]:
    yield cell
    value = cell.value
    inside = value if isinstance(value, dict) else vars(value) if is_record(value) else {}
    if id(value) in seen or len(cell.key) > _DEEPEST or len(inside) > _MOST:
        return
    seen.add(id(value))
    for key in list(inside):
        yield from _cells_of(Cell((*cell.key, str(key)), inside, key), seen)


_TABLES = frozenset(vars(nn.Module()))
_DEEPEST, _MOST = 5, 4096
NEW = object()


def view_of(value: Any) -> Any:
    """Of a list what it has now; what dicts and records have are cells of their own."""
    if isinstance(value, dict):
        return dict, tuple(value)
    if isinstance(value, list):
        return list, tuple(list.__iter__(value))  # of one that is watched too, which is not asked by this
    return (type(value), tuple(value)) if isinstance(value, set | deque) else value


def same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and isinstance(one, str | Number) and one == other
