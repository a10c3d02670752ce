"""A function's code: what makes it the same one again, although it is made anew in every step, and what it may change."""

from __future__ import annotations

import dis
import enum
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def code_of(function: Any) -> Any:
    """The code of a function or method, and of what a partial, or anything else with a `func`, calls."""
    function = getattr(function, "func", function)
    function = function.func if isinstance(function, partial) else function
    return getattr(getattr(function, "__func__", function), "__code__", None) or type(function)


def of_this_library(function: Any) -> bool:
    """Whether its code is a file of meshkit."""
    return str(getattr(code_of(function), "co_filename", "")).startswith(f"{Path(__file__).parents[1]}{os.sep}")


def held_tensors(function: Any) -> list[Tensor] | None:
    """The tensors that a function reaches beside its arguments, as weights of classes, where it certainly changes nothing but
    those if it is called once more, and runs no model but those it is given. None where it may.

    It may reach constants, tensors, torch's losses, and functions and objects of which the same holds.
    """
    reached = list(_reached(function, set()))
    if not all(map(_is_harmless, reached)):
        return None
    modules = [each for each in reached if isinstance(each, nn.Module)]
    return [each for each in reached if isinstance(each, Tensor)] + [each for m in modules for each in m.buffers()]


_ROOMS = ("torch", "meshkit", "einops", "math")
_WRITES = frozenset(("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "IMPORT_NAME"))
_SAYS = frozenset(("print", "input", "open", "exec", "eval", "setattr", "globals"))


def _is_harmless(value: Any) -> bool:
    if isinstance(value, CodeType):
        return not _SAYS & {*value.co_names} and not any(each.opname in _WRITES for each in dis.get_instructions(value))
    if isinstance(value, nn.Module):
        return type(value).__module__ == "torch.nn.modules.loss"
    plain = (Tensor, int, float, complex, str, bytes, type(None), type, enum.Enum, torch.dtype, torch.device)
    return isinstance(value, (*plain, ModuleType, BuiltinFunctionType))


def _reached(value: Any, seen: set[int]) -> Iterator[Any]:
    """What a function has at hand, by closures, defaults and global names, and what functions among that have."""
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        parts = [value.__func__, value.__self__]
    elif _is_object(value):
        parts = [*vars(value).values()]
        for kind in type(value).__mro__[:-1]:
            own = {name: each for name, each in vars(kind).items() if name == "__call__" or not name.startswith("__")}
            parts += [each for each in own.values() if isinstance(each, FunctionType | property)]
    elif isinstance(value, property):
        parts = [value.fget]
    elif isinstance(value, tuple | frozenset):
        parts = [*value]
    elif isinstance(value, FunctionType):
        known = (value.__module__ or "").partition(".")[0] in _ROOMS
        codes = [] if known else [value.__code__]
        for code in codes:  # those of functions inside of it too
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        names = {name for code in codes for name in code.co_names}
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        parts = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        parts += [value.__globals__[name] for name in names if name in value.__globals__]
        yield from codes
    else:
        yield value
    for part in parts:
        yield from _reached(part, seen)


def _is_object(value: Any) -> bool:
    """Of a class of the user's, which writes no attributes by itself."""
    kind = type(value)
    known = (kind.__module__ or "").partition(".")[0] in (*_ROOMS, "builtins")
    plain = hasattr(value, "__dict__") and "__setattr__" not in {
        name for each in kind.__mro__[:-1] for name in vars(each)
    }
    return plain and not known and not isinstance(value, nn.Module | ModuleType | FunctionType | type | Tensor)


def is_ours(function: Any) -> bool:
    """Whether meshkit made it."""
    function = function.func if isinstance(function, partial) else function
    return str(getattr(function, "__module__", "")).startswith("meshkit.")


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not yet
        return False
