"""Frozen records to and from TOML: a record is a table, and fields at their default are left out."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.plan import Style

Record = TypeVar("Record")


def toml_text(table: dict[str, Any]) -> str:
    import tomli_w  # here, as tomllib below: `import meshkit` writes and reads no TOML

    return tomli_w.dumps(table)


def to_table(record: Any) -> dict[str, Any]:
    """A frozen dataclass as a dict of what TOML can hold. Raises: PlanError for a function, which is no data."""
    # What is at its default is left out: a file says what was chosen, and fits in a glance.
    return {
        each.name: _written(getattr(record, each.name), f"{type(record).__name__}.{each.name}")
        for each in dataclasses.fields(record)
        if getattr(record, each.name) != _default(each)
    }


def _default(each: dataclasses.Field[Any]) -> Any:
    return each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default


def _written(value: Any, where: str) -> Any:
    if isinstance(value, Style):
        table = to_table(value)
        return table["kind"] if set(table) == {"kind"} else table
    if isinstance(value, MeshSpec):  # one text, as on a command line
        return value.text
    if isinstance(value, bool | int | float | str):
        return value  # None needs nothing: TOML has no null, but every None here is a default
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _written(item, f"{where}[{name!r}]") for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_written(item, where) for item in value]
    if where == "PipelinePolicy.schedule":
        raise PlanError(
            f"{where}={value!r} cannot be written to a file. Name a schedule, or write its table with "
            "mk.schedules.write_csv and give the file's path."
        )
    if not dataclasses.is_dataclass(value):
        raise PlanError(
            f"{where}={value!r} cannot be written to a file: only data can. Set it in the script that reads it."
        )
    return to_table(value)


def from_table(kind: type[Record], text: str, *, source: str) -> Record:
    """Raises: PlanError naming `source` and the place in it."""
    import tomllib

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{source}: this is no TOML: {error}.") from error
    record: Record = _record(kind, table, source)
    return record


def _record(kind: Any, table: Mapping[str, Any], where: str) -> Any:
    types_of = typing.get_type_hints(kind)  # annotations are texts here (`from __future__ import annotations`)
    for name in table:
        if name not in types_of:
            near = difflib.get_close_matches(name, types_of, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise PlanError(f"{where}: {kind.__name__} has no {name!r}. {hint}It has {', '.join(types_of)}.")
    needed = [each.name for each in dataclasses.fields(kind) if _default(each) is dataclasses.MISSING]
    if lacking := [name for name in needed if name not in table]:
        raise PlanError(f"{where}: {kind.__name__} needs {', '.join(lacking)}.")
    return kind(**{name: _read(types_of[name], value, f"{where}: {name}") for name, value in table.items()})


def _read(kind: Any, value: Any, where: str) -> Any:
    """The value as the type annotation `kind` wants it. Raises: PlanError naming `where`."""
    # A union is told by the shape of what TOML has: a table is a mapping or the record that has its names, a list a tuple, a
    # text a Literal, a dtype or a path. No annotation here has two options of one shape, other than records.
    options = list(_options(kind))
    records: list[Any] = [option for option in options if dataclasses.is_dataclass(option)]
    tables = [option for option in options if _is_a(option, Mapping)]
    lists = [option for option in options if _is_a(option, tuple)]
    if Style in options and isinstance(value, str | Mapping):
        return _record(Style, {"kind": value} if isinstance(value, str) else value, where)
    if isinstance(value, Mapping) and tables:
        _, item = typing.get_args(tables[0])
        return {name: _read(item, each, f"{where}[{name!r}]") for name, each in value.items()}
    if isinstance(value, Mapping) and records:
        return _record(_best(records, value), value, where)
    if isinstance(value, list) and lists:
        items = typing.get_args(lists[0])
        items = (items[0],) * len(value) if items[-1] is ... else items
        if len(items) != len(value):
            raise PlanError(f"{where}: {value!r} should have {len(items)} values.")
        return tuple(
            _read(item, each, f"{where}[{i}]") for i, (item, each) in enumerate(zip(items, value, strict=True))
        )
    if isinstance(value, str) and torch.dtype in options:
        dtype = getattr(torch, value, None)
        if not isinstance(dtype, torch.dtype):
            raise PlanError(f"{where}: {value!r} is no dtype. Write, for example, bfloat16.")
        return dtype
    if isinstance(value, str) and Path in options:
        return Path(value)
    wanted = tuple(option for option in options if option in (bool, int, float, str))
    if not isinstance(value, wanted) and not (float in wanted and isinstance(value, int)):
        raise PlanError(f"{where}: {value!r} {_should(wanted, records, tables, lists, options)}.")
    # In Python True is an int: `zero = true` would be the stage 1.
    if bool not in wanted and isinstance(value, bool):
        raise PlanError(f"{where}: {value!r} {_should(wanted, records, tables, lists, options)}.")
    return value


def _is_a(option: Any, kind: type) -> bool:
    """Is the annotation `Mapping[...]`, or `tuple[...]`?"""
    origin = typing.get_origin(option)
    return isinstance(origin, type) and issubclass(origin, kind)


def _should(wanted: Any, records: list[Any], tables: list[Any], lists: list[Any], options: list[Any]) -> str:
    if torch.dtype in options or Path in options:
        return f"should be a text, {'as bfloat16' if torch.dtype in options else 'a path'}"
    if wanted:
        return f"should be {' or '.join(option.__name__ for option in wanted)}"
    if records:
        return f"should be a table of {records[0].__name__}"
    if tables or lists:
        return f"should be {'a table' if tables else 'a list'}"
    return "is nothing that a file can say. Set it in the script that reads it"


def _best(records: list[Any], table: Mapping[str, Any]) -> Any:
    """The record whose names these are: `{bytes = ..., rows = ...}` is a Budget, `{mode = ...}` a Recompute."""
    return max(records, key=lambda kind: len(set(table) & {each.name for each in dataclasses.fields(kind)}))


def _options(kind: Any) -> Iterator[Any]:
    """The members of a union; a literal counts as its values' types."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        for option in typing.get_args(kind):
            yield from _options(option)
    elif typing.get_origin(kind) is typing.Literal:
        yield from {type(value) for value in typing.get_args(kind)}
    else:
        yield kind
