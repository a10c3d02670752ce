"""A few flips of the campaign, one mesh of each kind: all are named."""

from __future__ import annotations

import pytest

from tests.faults.flips import CELLS, MOMENTS, draw, rows_of
from tests.laws.parity.cases import Cell


@pytest.mark.parametrize("cell", [CELLS[1], CELLS[3], CELLS[9]], ids=lambda cell: cell.mesh)
def test_flips_at_any_moment_of_a_step_are_named_by_rank_and_tensor(cell: Cell) -> None:
    for row in rows_of(cell, range(4)):
        assert row["named"], row


def test_a_campaign_draws_every_kind_and_moment() -> None:
    drawn = {(each.kind, each.moment) for each in (draw(number, 4) for number in range(500))}
    assert drawn == {(kind, moment) for kind, moments in MOMENTS.items() for moment in moments}
