"""Change what a module's class does without changing the module: same object, same parameters, same names."""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

_made: WeakValueDictionary[Any, type] = WeakValueDictionary()


def patch_class(module: nn.Module, **namespace: Any) -> None:
    """Give `module` a subclass of its own class with `namespace` in it, under the same name.

    A subclass, not attributes of the instance, so that copies of the module stay whole; this is how FSDP2 does it.
    Modules of one class that are given the same share a subclass: torch.compile traces a layer for each class it meets, and
    gives up after eight. The same are functions of the same code over the same variables; they may not rebind those.
    """
    base = type(module)
    key = (base, _key(namespace))
    made = _made.get(key)
    if made is None:
        made = type(base.__name__, (base,), {"__module__": base.__module__, **namespace})
        _made[key] = made
    module.__class__ = made


def _key(value: Any, inside: frozenset[int] = frozenset()) -> Any:
    """Equal for values that do the same. By identity where nothing is known, which the class keeps alive.

    inside: of what this is a part, since a function may close over itself (a decorator's wrapper does, for one).
    """
    if id(value) in inside:
        return id(value)
    key = partial(_key, inside=inside | {id(value)})
    if isinstance(value, FunctionType):
        cells = tuple(key(cell.cell_contents) for cell in value.__closure__ or ())
        return value.__code__, cells, key(value.__defaults__), key(value.__kwdefaults__)
    if type(value) is partial:
        return partial, key(value.func), key(value.args), key(value.keywords)
    if type(value) is dict:
        return dict, tuple((name, key(item)) for name, item in value.items())
    if type(value) in (tuple, list):
        return type(value), tuple(key(item) for item in value)
    if isinstance(value, str | int | float | None):
        return type(value), value
    return id(value)
