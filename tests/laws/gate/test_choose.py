"""The gate's choice of cells, and the page that is made of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from tests.laws.gate import support
from tests.laws.gate.cell import REFUSALS, Cell, Refusal, draw, smallest
from tests.laws.gate.choose import covering, seeds, tuples

FIXED = [draw(*seed) for seed in covering(200, among=3000)]


def test_200_distinct_cells_run_in_ci() -> None:
    assert len(set(FIXED)) == 200


def test_every_feature_is_on_the_page() -> None:
    assert {feature for cell in FIXED for feature in cell.features()} <= set(support.FEATURES)


def test_any_two_features_that_can_meet_do() -> None:
    """Those that 3000 draws know."""
    met = set().union(*(tuples(cell, 2) for cell in FIXED if not cell.refusals()))
    known = {pair for seed in islice(seeds(), 3000) for pair in _pairs(draw(*seed))}
    assert known - met == set()


def _pairs(cell: Cell) -> set[tuple[str, ...]]:
    return set() if cell.refusals() else tuples(cell, 2)


def test_a_cell_prints_as_what_makes_it_again() -> None:
    for cell in FIXED:
        assert eval(str(cell), {"Cell": Cell}) == cell


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: f"{refusal.one}, {refusal.other}")
def test_the_smallest_cell_of_a_refusal_has_its_features(refusal: Refusal) -> None:
    assert refusal in smallest(refusal.one, refusal.other).refusals()


def test_the_support_pages_count_the_cells_of_the_results() -> None:
    results = support.read()
    cells = sum(last - first + 1 for first, last in results.seeds)
    one, triples = support.pages(results).values()
    assert f"**{cells} cells** have passed with torch {results.torch}" in one
    assert f"in the {cells} cells" in triples


def test_the_support_pages_of_other_results_are_other_pages() -> None:
    results = support.read()
    first = replace(results, seeds=[(0, 9)])
    assert "**10 cells** have passed" in support.pages(first)["support.md"]
    assert support.pages(first) == support.pages(first) != support.pages(results)


def test_what_was_run_is_what_would_be_drawn_now() -> None:
    """Else the counts are of other cells: run the gate again."""
    assert support.read().fingerprint == support.fingerprint()
