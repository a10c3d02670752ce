"""Matching the names of modules and parameters by the patterns of a plan, strictly."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from meshkit.errors import PlanError

Value = TypeVar("Value")


def match_table(table: Mapping[str, Value], names: Iterable[str], *, what: str) -> dict[str, Value]:
    """name -> value for every name that a pattern of the table matches, in the order of `names`.

    Raises: PlanError for a pattern that matches nothing (unless its value is optional), naming the nearest name, and
    for a name that two patterns match.
    """
    names = list(names)
    matched: dict[str, tuple[str, Value]] = {}  # name -> (pattern, value)
    # Strict in both directions: a typo would leave a module whole, and of two styles one would be dropped, without a word.
    for pattern, value in table.items():
        expression = _compile(pattern)
        matches = [name for name in names if expression.fullmatch(name)]
        if not matches and not getattr(value, "optional", False):
            raise PlanError(_no_match(pattern, names, what))
        for name in matches:
            if name in matched:
                raise PlanError(
                    f"plan: two patterns match the {what} {name!r}: {matched[name][0]!r} and {pattern!r}. Make one narrower."
                )
            matched[name] = (pattern, value)
    # In the order of the model and not of the table: whoever hooks or shards by it does so alike for every plan.
    return {name: matched[name][1] for name in names if name in matched}


def match_names(patterns: Iterable[str], names: Iterable[str], *, what: str) -> list[str]:
    """The names that the patterns match, in the order of `names`. Raises as `match_table` does."""
    return list(match_table(dict.fromkeys(patterns), names, what=what))


def _compile(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*|\{[^{}]*\})", pattern)
    pieces = []
    for part in parts:
        if part == "**":
            pieces.append(r".*")
        elif part == "*":
            pieces.append(r"[^.]*")
        elif part.startswith("{"):
            pieces.append("(?:" + "|".join(re.escape(choice) for choice in part[1:-1].split(",")) + ")")
        else:
            pieces.append(re.escape(part))
    return re.compile("".join(pieces))


def _no_match(pattern: str, names: list[str], what: str) -> str:
    # Compare shapes of names, not numbers: `layers.3.mlp` is near `layers.*.mpl`.
    general = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name): None for name in names if name}
    # cutoff 0: the nearest name of the model is a hint even where nothing is like the pattern.
    near = difflib.get_close_matches(pattern, general, n=1, cutoff=0.0)
    hint = f"The nearest is {near[0]!r}." if near else f"The model has no {what} with a name."
    return f"plan: pattern {pattern!r} matches no {what}. {hint} Correct the pattern, or remove it."
