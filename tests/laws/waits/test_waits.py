"""Law 10: the host waits for its device where the table says and nowhere else, and launches as many operators as it says."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from meshkit.strategy import States
from tests.laws.gate.cell import Cell
from tests.laws.waits.measure import Numbers, in_fake_world, numbers, optimizers_in_fake_world
from tests.laws.waits.table import PINNED, UPDATE, Pinned
from tests.world import pool

# Other versions of torch split operators otherwise.
COUNTED = torch.__version__.startswith("2.15")
ON_RANKS = [each for each in PINNED if str(each[0].mesh) in ("dp_shard=2 ep=2", "cp=2")]


def _name(value: object) -> str:
    return str(value) if isinstance(value, Cell) else ""


@pytest.mark.parametrize(("cell", "pinned"), PINNED, ids=_name)
def test_a_step_waits_and_launches_what_is_pinned(cell: Cell, pinned: Pinned) -> None:
    found = in_fake_world(cell)
    _refuse_other_waits(found, pinned)
    if COUNTED:
        assert (found.launches, found.clip) == (pinned.launches, pinned.clip)


@pytest.mark.parametrize(("cell", "pinned"), ON_RANKS, ids=_name)
def test_real_ranks_wait_where_a_fake_world_does(cell: Cell, pinned: Pinned) -> None:
    for found in pool(cell.spec.world_size).run(numbers, cell, timeout_s=200):
        _refuse_other_waits(found, pinned)


def _refuse_other_waits(found: Numbers, pinned: Pinned) -> None:
    assert not found.mixed, "tensors of the host and of the device meet in one operator"
    files = Counter(wait.partition("(")[2].partition(":")[0] for wait in found.waits)
    assert files == pinned.waits, found.waits
    assert found.guard_waits == 1
    assert found.copied_bytes <= found.batch_bytes + pinned.copied_beside, (
        "the batch moves to the device more than once"
    )
    assert found.optimizer <= 4, "of two groups, of one kernel each"


@pytest.mark.parametrize("states", UPDATE)
def test_the_launches_of_an_update_do_not_grow_with_the_number_of_parameters(states: States) -> None:
    few, many = optimizers_in_fake_world(states, 4, 40)
    assert few == many
    if COUNTED:
        assert few == UPDATE[states]
