"""Matching the names of modules and parameters by the patterns of a plan, strictly."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from meshkit.core.frozen_mapping import FrozenMapping
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


def match_blocks(patterns: Iterable[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """The modules that the patterns match, where a container without a forward, as a ModuleList, stands for those in it:
    nothing calls it, so nothing can be done when it runs. Raises as `match_table` does."""
    found: dict[str, None] = {}
    for name in match_names(patterns, modules, what="module"):
        found |= dict.fromkeys(_called(name, modules[name]))
    return list(found)


def _called(name: str, module: nn.Module) -> Iterator[str]:
    inner = list(module.named_children())
    if not inner or "forward" in vars(module) or type(module).forward is not nn.Module.forward:
        yield name
        return
    for key, child in inner:
        yield from _called(f"{name}.{key}", child)


def listed(names: Any, *, where: str, argument: str) -> tuple[str, ...]:
    """The names or patterns of an argument. where: the call or the record, for errors.

    Raises: PlanError for one text, which Python would take letter by letter, and for what is no list of texts.
    """
    asked = f"{where}({argument}={names!r})"
    if isinstance(names, str):
        raise PlanError(f"{asked}: a list of patterns, not one text. Write [{names!r}].")
    if not isinstance(names, Iterable):
        raise PlanError(f"{asked}: a list of patterns. Write, for example, ['layers.*'], or [] for none.")
    patterns: tuple[Any, ...] = tuple(names)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise PlanError(f"{asked}: {pattern!r} is no pattern. Write texts, for example 'layers.*'.")
    return patterns


def frozen_table(table: Any, kind: type[Value], *, where: str, argument: str) -> FrozenMapping[Value]:
    """A table from patterns to values of one kind, as its record keeps it. Raises: PlanError for anything else."""
    if not isinstance(table, Mapping):
        raise PlanError(
            f"{where}({argument}={table!r}): give a table from patterns to {kind.__name__}s, for example {{}}."
        )
    listed(table, where=where, argument=argument)
    for pattern, value in table.items():
        if not isinstance(value, kind):
            raise PlanError(
                f"{where}({argument}=...): {pattern!r} is {value!r}, which is no {kind.__name__}. Give "
                f"{_EXAMPLES[kind.__name__]}."
            )
    return FrozenMapping(table)


_EXAMPLES = {
    "Style": "column(), row(), or another function of mk.plan",
    "Init": "normal(), uniform() or constant() of mk.initialize",
    "BlockOverride": 'a BlockOverride, for example BlockOverride(recompute="full")',
}


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
