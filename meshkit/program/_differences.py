"""Differences of two programs of one model that were read on arguments of other sizes: operations, and their numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from meshkit.program._outline import computing
from meshkit.program._records import Operation, TensorRef, Trace


@dataclass(frozen=True)
class Difference:
    """one, other: the operations at a place, None where there is none. factor: the number of the same operation that is
    another, as (name, of one, of the other); None where the operations are others."""

    one: Operation | None
    other: Operation | None
    factor: tuple[str, Any, Any] | None = None


def differences(one: Trace, other: Trace, *, by_keywords: Collection[str] = ()) -> Iterator[Difference]:
    """In order, up to the first place where other operations run; sizes and dims are no differences.

    by_keywords: operations of our own that compute with the numbers in their keywords.
    """
    for a, b in zip_longest(computing(one), computing(other)):
        if a is None or b is None or a.name != b.name:
            yield Difference(a, b)
            return
        pairs = zip_longest(_factors(a, by_keywords), _factors(b, by_keywords), fillvalue=("one argument more", None))
        for (name, there), (_, here) in pairs:
            if there != here:
                yield Difference(a, b, (name, there, here))


def _factors(operation: Operation, by_keywords: Collection[str]) -> list[tuple[str, Any]]:
    """The numbers that an operation computes with: no sizes and no dims, and not what a range begins and ends with."""
    if isinstance(operation.op, str):
        given = list(operation.kwargs.items()) if operation.name in by_keywords else []
    else:
        ranges = operation.operator in ("arange", "linspace")
        schema = () if ranges else operation.op._schema.arguments
        named = dict(zip((each.name for each in schema), operation.args, strict=False)) | dict(operation.kwargs)
        kinds = {each.name: str(each.type) for each in schema}
        given = [(name, value) for name, value in named.items() if kinds.get(name, "") in _OF_VALUES]
    return [(name, None if isinstance(value, TensorRef) else value) for name, value in given]


_OF_VALUES = ("Tensor", "number", "float", "Optional[number]", "Optional[float]")
