"""Change what a module's class does without changing the module: same object, same parameters, same names."""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

_subclasses: WeakValueDictionary[Any, type] = WeakValueDictionary()


def patch_class(module: nn.Module, **namespace: Any) -> None:
    """Give `module` a subclass of its own class with `namespace` in it, under the same name.

    See [Note: subclasses are shared]. Functions in `namespace` may not rebind the variables they close over.
    """
    # [Note: subclasses are shared]
    # A subclass, as FSDP2 makes it, and no attributes of the instance: a deep copy of the module would share bound methods
    # with the original, and compute with the original's parameters. Modules of one class that are given equal namespaces get
    # one subclass: torch.compile guards on the class, so it would trace every layer anew, and give up after eight. Equal are
    # functions of the same code over the same variables. The dictionary is weak: a subclass lives as long as its modules.
    base = type(module)
    key = (base, _key(namespace))
    subclass = _subclasses.get(key)
    if subclass is None:
        subclass = type(base.__name__, (base,), {"__module__": base.__module__, **namespace})
        _subclasses[key] = subclass
    module.__class__ = subclass


def _key(value: Any, inside: frozenset[int] = frozenset()) -> Any:
    """Equal for values that do the same. By identity where nothing is known: the class keeps the value alive, so that its id
    is not given to another.

    inside: ids of the values around this one, since a function may close over itself, as a decorator's wrapper does.
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
