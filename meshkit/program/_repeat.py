"""Whether a model runs the same program at each call: it is called again, and what it keeps from call to call is watched.

One reading shows one call. A counter, a tensor kept of the batch before, a list that grows: what runs may depend on them, and
then nothing is known of later steps.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import nn

from meshkit.core._torch import tree_flatten
from meshkit.program._records import TensorRef, Trace, Unreadable

REMEDY = "so one reading does not show what later steps do. Use dp axes only, or write it without"


def twice(model: nn.Module, read: Callable[[], Trace], *, known: bool = False) -> Trace:
    """For `trace(again=...)`: the program of the first call. known: the model was called twice before, with other arguments;
    then it is called once if nothing that it keeps has changed.

    Raises: Unreadable for a model whose next call runs something else, or asks for a number that each call changes.
    """
    name, before = type(model).__name__, state(model)
    with _without_draws(name):
        first = read()
    changed = _changed(before, model)
    if known and not changed:
        return first
    asked: list[str] = []
    for module, attribute in changed:
        value = vars(model.get_submodule(module))[attribute]
        if type(value) in (int, float):
            label = f"{module}.{attribute}".lstrip(".")
            vars(model.get_submodule(module))[attribute] = _watched(value, partial(asked.append, label))
    said = f" ({', '.join(f'{module}.{attribute}'.lstrip('.') for module, attribute in changed[:3])} changed)" * bool(
        changed
    )
    try:
        second = read()
    except Exception as error:
        raise Unreadable(f"{name}: its second call raises {type(error).__name__}: {error}{said}, {REMEDY}.") from error
    if asked:
        raise Unreadable(f"{name}: what runs next depends on {asked[0]!r}, which each call changes, {REMEDY}.")
    if (where := _difference(first, second)) is not None:
        raise Unreadable(f"{name}: its second call runs something else at {where}{said}, {REMEDY}.")
    return first


def state(model: nn.Module) -> dict[tuple[str, str], Any]:
    """What modules hold beside parameters, buffers and modules."""
    return {
        (name, key): _view(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _TABLES
    }


_TABLES = frozenset(vars(nn.Module()))


def _view(value: Any) -> Any:
    """Of a list or dict what it has now."""
    if isinstance(value, dict):
        return dict, tuple(value.items())
    return (type(value), tuple(value)) if isinstance(value, list | set | deque) else value


def _changed(before: Any, model: nn.Module) -> list[tuple[str, str]]:
    now = state(model)
    return [key for key, value in now.items() if key not in before or not _same(before[key], value)]


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and isinstance(one, str | int | float) and one == other


def _difference(first: Trace, second: Trace) -> str | None:
    """Where two programs part."""
    for one, other in zip_longest(first.operations, second.operations):
        if one is None or other is None:
            return (one or other).where
        if one.name != other.name or _arguments(first, one) != _arguments(second, other):
            return other.where
    return None


def _arguments(trace: Trace, operation: Any) -> Any:
    def leaf(value: Any) -> Any:
        if not isinstance(value, TensorRef):
            return value if isinstance(value, str | int | float | None) else type(value).__name__
        kept = trace.storages[value.storage]
        # Of a tensor that an earlier call made there is no value.
        source = (kept.source, kept.value is None) if kept.source == "constant" else kept.source
        return source, value.shape, value.stride, value.offset, value.dtype

    return tuple(map(leaf, tree_flatten((operation.args, dict(operation.kwargs)))[0]))


@contextmanager
def _without_draws(name: str) -> Iterator[None]:
    """Raises: Unreadable where what is inside draws of Python's random numbers: others on each rank and in each call."""
    before = random.getstate()
    yield
    if random.getstate() != before:
        random.setstate(before)
        raise Unreadable(
            f"{name}: its forward draws of Python's `random`, which is not the same on all ranks, {REMEDY}."
        )


def _watched(value: Any, ask: Callable[[], None]) -> Any:
    """The number; `ask` is called when something is decided by it. Its sums and products are watched too."""
    kind = type(value)

    def decided(name: str) -> Any:
        def method(self: Any, *args: Any) -> Any:
            ask()
            return getattr(kind, name)(self, *args)

        return method

    def computed(name: str) -> Any:
        def method(self: Any, *args: Any) -> Any:
            result = getattr(kind, name)(self, *args)
            return _watched(result, ask) if type(result) in (int, float) else result

        return method

    deciding = ("__bool__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__")
    computing = (
        "__add__",
        "__radd__",
        "__sub__",
        "__rsub__",
        "__mul__",
        "__rmul__",
        "__mod__",
        "__floordiv__",
        "__neg__",
    )
    members = {name: decided(name) for name in deciding} | {
        name: computed(name) for name in computing if hasattr(kind, name)
    }
    return type("Watched", (kind,), members)(value)
