"""An immutable mapping (frozen dict), for tables inside of frozen dataclasses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

Value = TypeVar("Value")


class FrozenMapping(Mapping[str, Value]):
    """A mapping that nobody can change. Equal to any mapping of the same items; hashes if its values do; prints as a dict.

    A dict in a frozen record would leave the record without a hash, and whoever made it could change it later.
    """

    # Not a MappingProxyType alone: that is a view of a dict that its maker still holds, and it neither pickles, which ranks
    # of `check` need, nor copies, nor hashes before Python 3.12.
    __slots__ = ("_items",)
    _items: Mapping[str, Value]

    def __init__(self, items: Mapping[str, Value]) -> None:
        object.__setattr__(self, "_items", MappingProxyType(dict(items)))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"FrozenMapping: {name!r} cannot be set.")

    def __getitem__(self, key: str) -> Value:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))  # no order: `Mapping.__eq__` has none

    def __repr__(self) -> str:
        return repr(dict(self._items))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenMapping, (dict(self._items),)
