"""A function's code: what makes it the same one again, although it is made anew in every step, and what it may change."""

from __future__ import annotations

import dis
import enum
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn


def code_of(function: Any) -> Any:
    """The code of a function or method, and of what a partial, or anything else with a `func`, calls."""
    function = getattr(function, "func", function)
    function = function.func if isinstance(function, partial) else function
    return getattr(getattr(function, "__func__", function), "__code__", None) or type(function)


def changes_nothing(function: Any) -> bool:
    """Whether a function, called once more, certainly changes nothing, and runs no model but those it is given: it reaches
    only constants, torch's losses without weights, and functions of which the same holds."""
    return all(map(_is_harmless, _reached(function, set())))


_ROOMS = ("torch", "meshkit", "einops", "math")
_WRITES = frozenset(("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "IMPORT_NAME"))
_SAYS = frozenset(("print", "input", "open", "exec", "eval", "setattr", "globals"))


def _is_harmless(value: Any) -> bool:
    if isinstance(value, CodeType):
        return not _SAYS & {*value.co_names} and not any(each.opname in _WRITES for each in dis.get_instructions(value))
    if isinstance(value, nn.Module):
        return type(value).__module__ == "torch.nn.modules.loss" and not [*value.buffers()]
    plain = (int, float, complex, str, bytes, type(None), type, enum.Enum, torch.dtype, torch.device)
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


def is_ours(function: Any) -> bool:
    """Whether meshkit made it."""
    function = function.func if isinstance(function, partial) else function
    return str(getattr(function, "__module__", "")).startswith("meshkit.")


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not yet
        return False
