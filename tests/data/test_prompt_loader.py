"""Prompts come in one order on any number of ranks, from any point again, each place of the sequence once."""

from __future__ import annotations

import pytest

from meshkit.data import PromptLoader, Record, addition_tasks
from meshkit.errors import DataError

ROWS = addition_tasks(count=11).train


def steps(ranks: int, count: int, state: dict | None = None, global_batch: int = 4) -> list[list[tuple[int, Record]]]:
    loaders = [PromptLoader(ROWS, global_batch=global_batch, seed=3, rank=rank, ranks=ranks) for rank in range(ranks)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return [[pair for loader in loaders for pair in next(loader)] for _ in range(count)]


@pytest.mark.parametrize("ranks", [2, 3, 5])  # with 5, one rank has nothing
def test_steps_do_not_depend_on_ranks(ranks: int) -> None:
    assert steps(ranks, 7) == steps(1, 7)


def test_keys_count_and_an_epoch_has_each_row_once() -> None:
    found = [pair for step in steps(1, 2 * len(ROWS)) for pair in step]
    assert [key for key, _ in found] == list(range(8 * len(ROWS)))
    for epoch in range(8):
        of_epoch = [row.source for _, row in found[epoch * len(ROWS) : (epoch + 1) * len(ROWS)]]
        assert sorted(of_epoch) == sorted(row.source for row in ROWS)


def test_a_state_goes_on_elsewhere_and_is_refused_with_other_rows() -> None:
    loader = PromptLoader(ROWS, global_batch=4, seed=3)
    for _ in range(3):
        next(loader)
    assert loader.epoch == 12 / len(ROWS)
    assert steps(2, 4, loader.state_dict()) == steps(1, 7)[3:]
    other = PromptLoader(ROWS[1:], global_batch=4, seed=3)
    with pytest.raises(DataError, match="the saved data position has data="):
        other.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="there are no rows to ask about"):
        PromptLoader([], global_batch=4, seed=3)


def test_a_step_can_be_looked_up_without_moving_on() -> None:
    expected = steps(1, 4)
    loader = PromptLoader(ROWS, global_batch=4, seed=3)
    next(loader)
    assert [loader.of_step(step) for step in (3, 0, 2)] == [expected[3], expected[0], expected[2]]
    assert next(loader) == expected[1]
    halves = [PromptLoader(ROWS, global_batch=4, seed=3, rank=rank, ranks=2).of_step(2) for rank in range(2)]
    assert halves[0] + halves[1] == expected[2]
