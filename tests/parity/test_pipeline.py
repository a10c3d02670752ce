"""Laws 1 to 3 with a model's layers on several ranks: every schedule trains as one device does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parity.cases import Cell
from tests.parity.test_parity import check, choices, draws

SCHEDULES = [
    "gpipe",
    "1f1b",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "zbv",
    "v-half",
    "v-min",
    "dualpipe-v",
    "hanayo",
    "auto",
]

few = choices.map(lambda choice: {**choice, "microbatches": choice["microbatches"] * 2 - 1})  # 1, 3 and 5


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@draws(2)
@given(choice=few)
def test_every_schedule_equals_one_device(ranks: int, schedule: str, choice: dict) -> None:
    check(ranks, Cell(mesh=f"pp={ranks}", layers=2 * ranks + 1, schedule=schedule, **choice))


@pytest.mark.parametrize("mesh", ["pp=2 dp_shard=2", "pp=2 dp_replicate=2", "pp=2 tp=2", "pp=2 cp=2"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v"])
@draws(2)
@given(choice=few)
def test_schedules_on_two_axes_equal_one_device(mesh: str, schedule: str, choice: dict) -> None:
    check(4, Cell(mesh=mesh, layers=5, schedule=schedule, **choice))


@pytest.mark.parametrize("mesh", ["pp=2 dp_shard=2 tp=2", "pp=2 cp=2 tp=2", "pp=4 dp_shard=2"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@draws(1)
@given(choice=few, microbatches=st.integers(1, 6))
def test_schedules_on_eight_ranks_equal_one_device(mesh: str, schedule: str, choice: dict, microbatches: int) -> None:
    check(8, Cell(mesh=mesh, layers=8, schedule=schedule, **{**choice, "microbatches": microbatches}))


def test_stages_of_given_sizes_equal_one_device() -> None:
    check(2, Cell(mesh="pp=2", layers=5, stages=(1, 4), microbatches=3, tied=True))
