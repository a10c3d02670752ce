"""What a function reaches beside its arguments, and may change: to call it once more for a trial, and put all back."""

from __future__ import annotations

import dataclasses
import dis
import enum
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from io import IOBase
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshkit.core import _torch
from meshkit.core.held_values import contents_of, names_of

_MOST = 4096  # values that are looked at
# Whose functions change nothing, but by those names.
_ROOMS = ("torch", "meshkit", "einops", "math", "transformers", "peft", "numpy", "functools", "itertools", "operator")
_PURE = frozenset(
    (*_ROOMS, "builtins", "typing", "collections", "dataclasses", "enum", "contextlib", "_operator", "time")
)
_CLOSED = (_PURE | {"_io", "_thread"}) - {"meshkit"}  # objects of these keep things elsewhere than in their attributes
_SAYS = frozenset(("print", "input", "open", "exec", "eval", "setattr", "globals"))  # functions
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD")
_WRITES = frozenset(("write", "writelines", "save"))  # and methods

# [Note: what a trial puts back]
# Lists, dicts, sets, attributes of objects and of classes of the user's, global names, variables of closures and random
# generators that a function reaches are put back after a call of it; tensors are replaced by copies inside (`Replaced`). So a
# loss that notes something in a list may be tried. What lies outside of Python's memory, and objects of which it is not known
# where they keep things, stand in the way.


@dataclass(eq=False)
class Reach:
    """tensors: with the buffers and parameters of modules. obstacle: why it may not be called once more, in words; or empty.
    Others are what a call may change."""

    tensors: list[Tensor] = field(default_factory=list)
    obstacle: str = ""
    _containers: list[Any] = field(default_factory=list)
    _spaces: list[dict[str, Any]] = field(default_factory=list)  # attributes of objects
    _classes: list[type] = field(default_factory=list)
    _cells: list[CellType] = field(default_factory=list)
    _globals: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    _generators: list[torch.Generator] = field(default_factory=list)

    @contextmanager
    def put_back(self) -> Iterator[Callable[[], bool]]:
        """Around a call; gives whether something has changed so far."""
        contents = [(each, _content(each)) for each in (*self._containers, *self._spaces)]
        classes = [(kind, dict(vars(kind))) for kind in self._classes]
        cells = [(cell, cell.cell_contents) for cell in self._cells]
        names = [(space, name, space[name]) for space, name in self._globals if name in space]
        states = [(each, each.get_state()) for each in self._generators]

        def changed() -> bool:
            return (
                any(not _are_same(_content(each), content) for each, content in contents)
                or any(cell.cell_contents is not content for cell, content in cells)
                or any(space.get(name) is not value for space, name, value in names)
                or any(not _are_same(dict(vars(kind)), own) for kind, own in classes)
            )

        try:
            yield changed
        finally:
            for each, content in contents:
                _fill(each, content)
            for kind, own in classes:
                for name in {*vars(kind)} - {*own}:
                    delattr(kind, name)
                for name, value in own.items():
                    if vars(kind).get(name) is not value:
                        setattr(kind, name, value)
            for cell, value in cells:
                cell.cell_contents = value
            for space, name, value in names:
                space[name] = value
            for generator, state in states:
                generator.set_state(state)


def reach_of(function: Any) -> Reach:
    """Follows closures, defaults, attributes and global names, and what functions among that have."""
    found = Reach()
    rest: list[tuple[str, Any]] = [(getattr(function, "__name__", type(function).__name__), function)]
    seen = set[int]()
    kept = list[Any]()  # while their ids are compared
    while rest and not found.obstacle:
        label, value = rest.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kept.append(value)
        rest += _look(found, label, value)
        if len(seen) > _MOST:
            found.obstacle = f"`{label}` is among more than {_MOST} values that it reaches"
    return found


def _look(found: Reach, label: str, value: Any) -> list[tuple[str, Any]]:
    """Notes the value, and returns its parts with what they are called."""
    if isinstance(value, Tensor):
        if isinstance(value, DTensor):
            found.obstacle = f"`{label}` is split over ranks"
        elif value.is_meta or _torch.is_fake(value):
            found.obstacle = f"`{label}` has no values"
        found.tensors.append(value)
        return []
    if isinstance(
        value, str | bytes | int | float | complex | None | enum.Enum | torch.dtype | torch.device | range | slice
    ):
        return []
    if isinstance(value, torch.Generator):
        found._generators.append(value)
        return []
    if isinstance(value, CodeType):
        found.obstacle = _obstacle(value)
        return []
    if isinstance(value, partial):
        named = [(f"{label}({name}=)", each) for name, each in value.keywords.items()]
        return [(label, value.func), *((label, each) for each in value.args), *named]
    if isinstance(value, MethodType):
        return [(label, value.__func__), (_owner(label), value.__self__)]
    if isinstance(value, staticmethod | classmethod):
        return [(label, value.__func__)]
    if isinstance(value, property):
        return [(label, each) for each in (value.fget, value.fset) if each is not None]
    if isinstance(value, cached_property):
        return [(label, value.func)]
    if isinstance(value, FunctionType):
        return _parts_of_function(found, label, value)
    if isinstance(value, BuiltinFunctionType):
        return _parts_of_builtin(found, label, value)
    if isinstance(value, ModuleType):
        return []  # what is read of it is followed where its name is read
    if isinstance(value, type):
        return _parts_of_class(found, label, value)
    if isinstance(value, tuple | frozenset):
        return [(label, each) for each in value]
    if isinstance(value, list | set | deque):
        found._containers.append(value)
        return [(label, each) for each in value]
    if isinstance(value, dict):
        found._containers.append(value)
        return [(f"{label}[{_key(key)}]", each) for key, each in value.items()]
    if isinstance(value, nn.Module):
        return _parts_of_module(found, label, value)
    return _parts_of_object(found, label, value)


def _owner(label: str) -> str:
    return label.rpartition(".")[0] or label


def _root(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def _parts_of_function(found: Reach, label: str, value: FunctionType) -> list[tuple[str, Any]]:
    original = getattr(value, "_torchdynamo_orig_callable", None)
    if original is not None:
        return [(label, original)]
    cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    filled = {name: cell for name, cell in cells.items() if contents_of(cell)}
    parts = [(name, cell.cell_contents) for name, cell in filled.items()]
    parts += [(label, each) for each in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())]
    if _root(value) in _ROOMS:
        return parts
    found._cells += filled.values()
    names, space = names_of(value.__code__), value.__globals__
    found._globals += [(space, name) for name in names if name in space]
    parts += [(name, space[name]) for name in names if name in space and not isinstance(space[name], ModuleType)]
    for name in names:
        if isinstance(module := space.get(name), ModuleType):
            parts += _parts_of_namespace(name, module, names)
    return [*parts, (label, value.__code__)]


def _parts_of_namespace(label: str, module: ModuleType, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """What functions with these names may read of it."""
    if module.__name__.partition(".")[0] in _PURE:
        return []
    parts: list[tuple[str, Any]] = []
    for name in names:
        value = vars(module).get(name)
        if isinstance(value, ModuleType) and value is not module:
            parts += _parts_of_namespace(f"{label}.{name}", value, tuple(each for each in names if each != name))
        elif value is not None:
            parts.append((f"{label}.{name}", value))
    return parts


def _parts_of_builtin(found: Reach, label: str, value: Any) -> list[tuple[str, Any]]:
    owner = value.__self__
    if isinstance(owner, ModuleType) or owner is None:
        room = (value.__module__ or "").partition(".")[0].lstrip("_")
        if room not in _PURE and room not in ("functorch", "C", "warnings", ""):
            found.obstacle = f"it may call `{label}`"
        return []
    return [(_owner(label), owner)]


def _parts_of_class(found: Reach, label: str, value: type) -> list[tuple[str, Any]]:
    parts: list[tuple[str, Any]] = []
    for kind in value.__mro__:
        if _root(kind) in _PURE or _root(kind) == "abc" or issubclass(kind, enum.Enum):
            continue
        if not kind.__flags__ & (1 << 9):  # a heap type
            found.obstacle = f"`{label}` is the type {kind.__qualname__}, written in C"
            return []
        found._classes.append(kind)
        own = {
            name: each for name, each in vars(kind).items() if isinstance(each, _METHODS) or not name.startswith("__")
        }
        parts += [(f"{label}.{name}", each) for name, each in own.items() if not _is_slot(each)]
    return parts


_METHODS = (FunctionType, staticmethod, classmethod, property, cached_property)


def _is_slot(value: Any) -> bool:
    return type(value).__name__ in (
        "getset_descriptor",
        "member_descriptor",
        "_abc_data",
        "wrapper_descriptor",
        "_tuplegetter",
    )


def _parts_of_module(found: Reach, label: str, value: nn.Module) -> list[tuple[str, Any]]:
    """Its state is put back, its tensors are replaced; what its hooks and a forward of the user's reach is looked at."""
    parts: list[tuple[str, Any]] = []
    for name, module in value.named_modules():
        own = f"{label}.{name}" if name else label
        found._spaces += [vars(module), module._buffers, module._parameters]
        parts += [(own, each) for each in (*module._parameters.values(), *module._buffers.values())]
        hooks = [each for name, hooked in vars(module).items() if name.endswith("_hooks") for each in hooked.values()]
        parts += [(f"a hook of {own}", each) for each in hooks]
        if _root(type(module)) not in _ROOMS:
            parts.append((own, type(module)))
            inner = {name: each for name, each in vars(module).items() if not name.startswith("_")}
            parts += [(f"{own}.{name}", each) for name, each in inner.items()]
    return parts


def _parts_of_object(found: Reach, label: str, value: Any) -> list[tuple[str, Any]]:
    kind = type(value)
    if isinstance(value, DeviceMesh | ProcessGroup) or (kind.__name__ == "Mesh" and _root(kind) == "meshkit"):
        return []  # a trial sends nothing: that it raises
    if isinstance(value, IOBase):
        found.obstacle = f"it may write to `{label}`, a file"
        return []
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # dataclasses set it
        return [(f"{label}.{each.name}", getattr(value, each.name, None)) for each in dataclasses.fields(value)] + [
            (label, kind)
        ]
    if kind.__module__ == "numpy" and hasattr(value, "copy"):
        if kind.__name__ == "ndarray":
            found._containers.append(value)
        return []
    if _root(kind) == "typing" or kind.__name__ in ("method_descriptor", "wrapper_descriptor", "method-wrapper"):
        return []
    if _root(kind) in _CLOSED or not hasattr(value, "__dict__"):
        found.obstacle = f"`{label}`, a {kind.__qualname__}, may be changed by it"
        return []
    found._spaces.append(vars(value))
    return [*((f"{label}.{name}", each) for name, each in vars(value).items()), (label, kind)]


def _obstacle(code: CodeType) -> str:
    where = f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"
    for each in dis.get_instructions(code):
        if (
            str(each.argval) in (_SAYS if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") else _WRITES)
            and each.opname in _LOADS
        ):
            return f"it calls `{each.argval}` ({where})"
        if each.opname == "IMPORT_NAME" and str(each.argval).partition(".")[0] not in _PURE:
            return f"it imports `{each.argval}` ({where})"
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and (found := _obstacle(inner)):
            return found
    return ""


def _content(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return value.copy() if type(value).__module__ == "numpy" else [*value]


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is, one, other))
    return bool((one == other).all())


def _is(one: Any, other: Any) -> bool:
    return one is other


def _fill(value: Any, content: Any) -> None:
    if _are_same(_content(value), content) and not isinstance(value, set):
        return
    if isinstance(value, dict):
        dict.clear(value)
        dict.update(value, content)
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), content)
    elif isinstance(value, set | deque):
        value.clear()
        value.update(content) if isinstance(value, set) else value.extend(content)
    else:
        value[...] = content


def _key(key: object) -> str:
    """As it is written; of one that would fill the page, as a tensor, its class."""
    text = repr(key)
    return text if len(text) <= 60 else type(key).__name__
