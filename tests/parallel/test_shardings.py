"""Every row of the table of shardings equals one device, sends what is explained and holds what the closed form says."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from meshkit.preflight.explain import Message
from meshkit.strategy import LEVELS, DataPolicy
from tests.laws.parity.cases import Cell, Moe, run_cell
from tests.laws.parity.test_bytes import assert_alike, observe_step
from tests.world import pool

pytestmark = pytest.mark.turns(2)

TOL_FP64 = 1e-10  # only the order of summation differs
NESTED = "dp_replicate=2 dp_shard=2x2"
ROWS = [
    DataPolicy(parameters=parameters, gradients=gradients, states=states)
    for parameters, gradients, states in product(LEVELS, repeat=3)
    if states != "none" and max(map(LEVELS.index, (parameters, gradients))) <= LEVELS.index(states)
]


def check(world: int, cell: Cell) -> None:
    for outcome in pool(world).run(run_cell, cell):
        assert outcome.loss <= TOL_FP64, cell
        assert outcome.gradient <= TOL_FP64, (outcome.worst, cell)
        assert outcome.norm <= TOL_FP64, cell
        assert outcome.parameter <= TOL_FP64, cell


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.parameters}-{row.gradients}-{row.states}")
def test_every_row_equals_one_device_and_sends_what_is_explained(row: DataPolicy) -> None:
    # Five rows on eight ranks: three have none. 61 words and 45 features are no multiple of a level.
    cell = Cell(mesh=NESTED, data=row, microbatches=1 + ROWS.index(row) % 3, vocab=61, hidden_mlp=45)
    check(8, cell)
    assert_alike(pool(8).run(observe_step, cell))
