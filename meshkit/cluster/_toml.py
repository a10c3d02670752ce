"""Clusters to and from TOML: a record is a table, a tuple of records an array of tables; defaults are left out."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from meshkit.errors import ClusterError

Record = TypeVar("Record")


def toml_text(table: dict[str, Any]) -> str:
    import tomli_w  # here, as tomllib below: `import meshkit` writes and reads no TOML

    return tomli_w.dumps(table)


def table_of(record: Any) -> dict[str, Any]:
    return {
        each.name: _written(getattr(record, each.name))
        for each in dataclasses.fields(record)
        if getattr(record, each.name) != _default(each)
    }


def read_table(kind: type[Record], text: str, *, source: str) -> Record:
    """Raises: ClusterError naming `source` and the place in it."""
    import tomllib

    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ClusterError(f"{source}: this is no TOML: {error}.") from error
    record: Record = _record(kind, table, source)
    return record


def _default(each: dataclasses.Field[Any]) -> Any:
    return each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default


def _written(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return [_written(item) for item in value]
    return table_of(value) if dataclasses.is_dataclass(value) else value


def _record(kind: Any, table: Any, where: str) -> Any:
    if not isinstance(table, Mapping):
        raise ClusterError(f"{where}: {table!r} is no table. Write [section] and its values below.")
    hints = typing.get_type_hints(kind)
    names = {each.name: each for each in dataclasses.fields(kind)}
    for name in table:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise ClusterError(f"{where}: there is no {name!r}. {hint}It may have {', '.join(names)}.")
    for name, each in names.items():
        if name not in table and _default(each) is dataclasses.MISSING:
            raise ClusterError(
                f"{where}: {name!r} is missing. Give it; the datasheets of meshkit.cluster are examples."
            )
    return kind(**{name: _value(hints[name], value, f"{where}: {name}") for name, value in table.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):  # of a record and None, which a file says by leaving it out
        hint = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _record(hint, value, where)
    if origin is tuple and args and dataclasses.is_dataclass(args[0]):
        if not isinstance(value, list):
            raise ClusterError(f"{where}={value!r}: give an array of tables, as [[{where.rpartition(': ')[2]}]].")
        return tuple(_record(args[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is tuple:
        return _tuples(value, where)
    if hint is bool and not isinstance(value, bool):
        raise ClusterError(f"{where}={value!r}: give true or false.")
    wanted = {float: (int, float), int: (int,), str: (str,)}.get(hint)
    if wanted is not None and (isinstance(value, bool) or not isinstance(value, wanted)):
        raise ClusterError(f"{where}={value!r}: give a {'text' if hint is str else 'number'}.")
    if hint in (float, int):
        _refuse_infinite(value, where)
    if origin is not None and issubclass(origin if isinstance(origin, type) else types.NoneType, Mapping):
        if not isinstance(value, Mapping) or not all(type(item) in (int, float) for item in value.values()):
            raise ClusterError(f"{where}={value!r}: give a table of numbers.")
        for key, item in value.items():
            _refuse_infinite(item, f"{where}.{key}")
        return {str(key): float(item) for key, item in value.items()}
    return float(value) if hint is float else value


def _tuples(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(item, where) for item in value)
    if type(value) not in (int, float):
        raise ClusterError(f"{where}: {value!r} is no number.")
    _refuse_infinite(value, where)
    return value


def _refuse_infinite(value: float, where: str) -> None:
    """TOML writes inf and nan, and an integer of any length."""
    try:
        is_finite = math.isfinite(value)
    except OverflowError:
        is_finite = False
    if not is_finite:
        raise ClusterError(f"{where}={value!r:.20}: give a finite number.")
