"""Laws 1 to 3 with a model's layers on several ranks: every schedule trains as one device does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.depth import covering, deal, deep, draws, thin
from tests.parity.cases import Cell
from tests.parity.test_parity import CHOICES, check, choices

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

# (ranks, mesh, layers, schedule): every schedule alone, and those that differ in kind with a second and a third axis.
RUNS = [
    *((ranks, f"pp={ranks}", 2 * ranks + 1, schedule) for ranks in (2, 3, 4) for schedule in SCHEDULES),
    *(
        (4, f"pp=2 {axis}=2", 5, schedule)
        for axis in ("dp_shard", "dp_replicate", "tp", "cp")
        for schedule in ("1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v")
    ),
    *(
        (8, mesh, 8, schedule)
        for mesh in ("pp=2 dp_shard=2 tp=2", "pp=2 cp=2 tp=2", "pp=4 dp_shard=2")
        for schedule in ("1f1b", "zbv")
    ),
]
ROWS = covering({**CHOICES, "microbatches": [1, 3, 5]})


@pytest.mark.parametrize(
    ("run", "choice"), [pytest.param(*each, id=f"{each[0][1]},{each[0][3]}") for each in thin(deal(ROWS, RUNS), 9)]
)
def test_every_schedule_equals_one_device(run: tuple[int, str, int, str], choice: dict) -> None:
    ranks, mesh, layers, schedule = run
    check(ranks, Cell(mesh=mesh, layers=layers, schedule=schedule, **choice))


@deep
@pytest.mark.parametrize("run", RUNS, ids=str)
@draws(2)
@given(choice=choices, microbatches=st.integers(1, 6))
def test_any_choices_equal_one_device(run: tuple[int, str, int, str], choice: dict, microbatches: int) -> None:
    ranks, mesh, layers, schedule = run
    check(ranks, Cell(mesh=mesh, layers=layers, schedule=schedule, **{**choice, "microbatches": microbatches}))


def test_stages_of_given_sizes_equal_one_device() -> None:
    check(2, Cell(mesh="pp=2", layers=5, stages=(1, 4), microbatches=3, tied=True))
