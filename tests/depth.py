"""How deep the suite looks. By default each law is tried on fixed cells, among which any two choices meet; with
MESHKIT_TEST_DEPTH=deep (`make test-deep`) on more cells besides, drawn anew in every run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import combinations, cycle
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings

DEEP = os.environ.get("MESHKIT_TEST_DEPTH") == "deep"
deep = pytest.mark.skipif(not DEEP, reason="make test-deep draws these cells")

settings.register_profile("ci", deadline=None, derandomize=True)  # no deadline: the machine may be busy
settings.register_profile("deep", deadline=None, print_blob=True)
settings.load_profile("deep" if DEEP else "ci")

Hand = TypeVar("Hand")
Choice = tuple[str, int]  # a name and the place of one of its values


def thin(cases: Sequence[Hand], every: int) -> list[Hand]:
    """Every n-th of the cases; when deep, all. For what the gate also meets: see tests/laws/gate."""
    return list(cases) if DEEP else list(cases[::every])


def draws(examples: int) -> settings:
    """For examples that run on ranks; when deep, four times as many, and others in every run."""
    return settings(
        max_examples=4 * examples if DEEP else examples,
        phases=(Phase.explicit, Phase.generate),  # shrinking would restart the ranks for every try
        suppress_health_check=list(HealthCheck),
    )


def covering(table: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few rows of choices in which any two choices of two names meet at least once: a covering array of strength 2.

    Greedy: each row takes, name by name, the choice that meets most partners for the first time. 12 names of 2 to 5 choices
    give 16 rows, of 46080 that there are.
    Source: Cohen et al. 1997, The AETG System.
    """
    names = sorted(table, key=lambda name: -len(table[name]))
    missing: set[tuple[Choice, Choice]] = {
        ((one, i), (other, j))
        for one, other in combinations(names, 2)
        for i in range(len(table[one]))
        for j in range(len(table[other]))
    }
    rows: list[dict[str, int]] = []
    while missing:
        row: dict[str, int] = {}
        for name in names:
            worth = [_worth((name, choice), row, missing) for choice in range(len(table[name]))]
            first = len(rows) % len(worth)  # of those worth the same, not always the same
            row[name] = max(range(first, first + len(worth)), key=lambda at: worth[at % len(worth)]) % len(worth)
        missing -= {(one, other) for one, other in missing if row[one[0]] == one[1] and row[other[0]] == other[1]}
        rows.append(row)
    return [{name: table[name][row[name]] for name in table} for row in rows]


def _worth(choice: Choice, row: dict[str, int], missing: set[tuple[Choice, Choice]]) -> tuple[int, int]:
    """(pairs it would meet in this row, pairs it has yet to meet)"""
    return sum((other, choice) in missing for other in row.items()), sum(choice in pair for pair in missing)


def deal(rows: Sequence[dict[str, Any]], hands: Sequence[Hand], *, each: int = 1) -> list[tuple[Hand, dict[str, Any]]]:
    """(hand, row) with the rows dealt round: every hand gets `each`, and every row goes out before one goes out again."""
    assert len(hands) * each >= len(rows), f"{len(rows)} rows for {len(hands)} hands"
    return [(hand, dict(row)) for hand, row in zip([*hands] * each, cycle(rows), strict=False)]
