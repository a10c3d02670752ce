"""Numbers and lists that tell when something is decided by them: what a model keeps from call to call, and asks for."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from numbers import Number
from typing import Any

Ask = Callable[[], None]


class WatchedNumber:
    """In place of a number. Sums, products and the like are watched too; to compare it, to index by it, or to make it a plain
    number asks. To print it does not."""

    def __init__(self, value: Any, ask: Ask) -> None:
        self._value, self._ask = value, ask

    def __repr__(self) -> str:
        return repr(self._value)

    def __format__(self, spec: str) -> str:
        return format(self._value, spec)

    def __hash__(self) -> int:
        self._ask()
        return hash(self._value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._ask()
        return getattr(self._value, name)


def _deciding(function: Callable[..., Any]) -> Any:
    def method(self: WatchedNumber, *args: Any) -> Any:
        self._ask()
        return function(self._value, *map(plain, args))

    return method


def _computing(function: Callable[..., Any]) -> Any:
    def method(self: WatchedNumber, *args: Any) -> Any:
        result = function(self._value, *map(plain, args))
        return WatchedNumber(result, self._ask) if isinstance(result, Number) else result

    return method


_DECIDING: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "index")},
    **{kind.__name__: kind for kind in (bool, int, float, complex)},
    "divmod": divmod,
}
_COMPUTING: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("neg", "pos", "abs", "invert")},
    "round": round,
}
_OF_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
for _name in _OF_TWO:
    _of_two: Callable[..., Any] = getattr(operator, _name)
    _COMPUTING[_name.rstrip("_")] = _of_two
    _COMPUTING[f"r{_name.rstrip('_')}"] = lambda a, b, of_two=_of_two: of_two(b, a)
for _name, _function in _DECIDING.items():
    setattr(WatchedNumber, f"__{_name}__", _deciding(_function))
for _name, _function in _COMPUTING.items():
    setattr(WatchedNumber, f"__{_name}__", _computing(_function))


def watched(value: Any, ask: Ask) -> Any:
    """`value`, and `ask` is called when something is decided by it; None for what cannot be watched."""
    if isinstance(value, Number) and not isinstance(value, bool):
        return WatchedNumber(value, ask)
    if type(value) is list:
        return _watched_list(value, ask)
    return _WatchedSource(value, ask) if is_source(value) else None


def is_source(value: Any) -> bool:
    """Whether it gives something else each time it is asked: an iterator, or random numbers."""
    drawing = type(value).__module__.startswith("numpy.random") or isinstance(value, random.Random)
    return drawing or isinstance(value, Iterator)


class _WatchedSource:
    def __init__(self, value: Any, ask: Ask) -> None:
        self._value, self._ask = value, ask

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        self._ask()
        return next(self._value)

    def __getattr__(self, name: str) -> Any:
        self._ask()
        return getattr(self._value, name)


def _watched_list(value: list[Any], ask: Ask) -> list[Any]:
    """To add to it does not ask."""

    def decided(name: str) -> Any:
        def method(self: Any, *args: Any) -> Any:
            ask()
            return getattr(list, name)(self, *args)

        return method

    deciding = ("__len__", "__getitem__", "__iter__", "__contains__", "__eq__", "__reversed__", "index", "count", "pop")
    return type("Watched", (list,), {name: decided(name) for name in deciding})(value)  # type: ignore[no-any-return]


def plain(value: Any) -> Any:
    """The number that a watched one stands for, of which nothing is asked."""
    return value._value if isinstance(value, WatchedNumber) else value
