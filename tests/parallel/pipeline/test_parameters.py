"""A forward or a loss that goes through all of the model's parameters, of which a stage has its own."""

from __future__ import annotations

import pytest

from tests.zoo.case import Cell
from tests.zoo.sweep import verdict


@pytest.mark.parametrize("name", ["DtypeOfFirst", "CountsElements", "CountsTied", "CountsModules", "CountsInLoss"])
def test_parameters_of_other_stages_are_counted(name: str) -> None:
    row = verdict(Cell.of(f"odd.{name}", "pp=2"))
    assert row.outcome == "equal", f"{row.text}\n{row.traceback}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PenaltyKept", "reads 'lm_head.weight' outside of the module that has it"),
        ("PenaltyInLoss", "reads something that has no values on the last stage: parameters of other stages"),
    ],
)
def test_a_penalty_that_a_loss_reads_is_refused(name: str, text: str) -> None:
    row = verdict(Cell.of(f"odd.{name}", "pp=2"))
    assert row.outcome == "refused", f"{row.text}\n{row.traceback}"
    assert text in row.text
