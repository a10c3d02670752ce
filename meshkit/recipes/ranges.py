"""Ranges of numbers that flags take, declared where the flag is, and the one place that refuses what is outside of them."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from meshkit.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Range:
    """From `low` to `high`, both included; without `low` itself if it is `open`. infinite: whether inf is a number of it."""

    low: float
    high: float = math.inf
    open: bool = False
    infinite: bool = False

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float) or math.isnan(value) or (math.isinf(value) and not self.infinite):
            return False
        return (value > self.low if self.open else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        if math.isinf(self.low):
            return "finite"
        low = f"more than {self.low:g}" if self.open else f"at least {self.low:g}"
        return low if math.isinf(self.high) else f"{low} and at most {self.high:g}"


Count = Annotated[int, Range(low=1)]
CountOrNone = Annotated[int, Range(low=0)]
Positive = Annotated[float, Range(low=0, open=True)]
NotNegative = Annotated[float, Range(low=0)]
Finite = Annotated[float, Range(low=-math.inf)]
Share = Annotated[float, Range(low=0, high=1)]
Threshold = Annotated[float, Range(low=0, open=True, infinite=True)]


@dataclass(frozen=True, kw_only=True)
class Ranged:
    """A base of dataclasses of flags: a number outside of its field's range is refused where the object is made, by a command
    line or in Python; a path may be a text there. Raises: DataError."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if str(each.type).startswith("Path") and isinstance(value, str | os.PathLike):
                object.__setattr__(self, each.name, Path(value))
            elif str(each.type).startswith("tuple[Path"):
                object.__setattr__(self, each.name, tuple(map(Path, value)))
        for name, wanted in _ranges(type(self)).items():
            value = getattr(self, name)
            if value is not None and value not in wanted:
                raise DataError(f"--{name.replace('_', '-')} {value}: give a number that is {wanted}.")


def _ranges(kind: type) -> dict[str, Range]:
    """By field. One that a recipe names again, for another default, keeps its range."""
    found: dict[str, Range] = {}
    for base in kind.__mro__:
        for name, annotation in vars(base).get("__annotations__", {}).items():
            hint = _hint(annotation, base)
            declared = [
                each for each in (hint, *get_args(hint)) if get_origin(each) is Annotated
            ]  # alone, or beside None
            for said in (said for each in declared for said in each.__metadata__ if isinstance(said, Range)):
                found.setdefault(name, said)
    return found


def _hint(annotation: Any, base: type) -> Any:
    """Of the text of an annotation what it stands for; None where its names are not those of a module, as in a notebook's
    function: then it has no range of its own."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(sys.modules[base.__module__]))
    except Exception:
        return None
