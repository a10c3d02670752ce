"""The cells of the suite are not fewer than they should be."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.depth import covering, deal


@pytest.mark.parametrize("table", [{"a": [1, 2, 3], "b": "xyz", "c": [None, 5], "d": [0, 1]}, {"a": [1, 2], "b": [3]}])
def test_any_two_choices_meet_in_a_row(table: dict) -> None:
    rows = covering(table)
    for one, other in combinations(table, 2):
        assert {(row[one], row[other]) for row in rows} == set(product(table[one], table[other]))


def test_every_row_is_dealt() -> None:
    rows = [{"a": 1}, {"a": 2}]
    assert deal(rows, ["x", "y", "z"]) == [("x", {"a": 1}), ("y", {"a": 2}), ("z", {"a": 1})]
    with pytest.raises(AssertionError, match="2 rows for 1 hands"):
        deal(rows, ["x"])
