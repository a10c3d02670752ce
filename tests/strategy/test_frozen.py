"""A frozen record cannot be changed by anybody: it hashes, and keeps no mapping or list of its maker's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import meshkit as mk
from meshkit.strategy import BlockOverride, PipelinePolicy, Strategy
from tests.strategy.test_strategy import EVERYTHING

ONE = {"layers.0": BlockOverride(recompute="full")}


def test_equal_strategies_have_one_hash_whatever_they_were_made_of() -> None:
    assert hash(Strategy()) == hash(Strategy())
    same = Strategy.from_toml(EVERYTHING.to_toml())
    assert same == EVERYTHING and hash(same) == hash(EVERYTHING)
    assert len({EVERYTHING, same, Strategy()}) == 2


@pytest.mark.parametrize("made", [Strategy(overrides=ONE), EVERYTHING], ids=["overrides", "everything"])
def test_a_strategy_survives_copies_pickles_and_files(made: Strategy) -> None:
    for again in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again == made and hash(again) == hash(made)
    assert Strategy.from_toml(made.to_toml()) == made


def test_what_a_record_was_made_of_may_change_and_the_record_does_not() -> None:
    overrides, styles, blocks = dict(ONE), {"up": mk.plan.column()}, ["layers.*"]
    made = Strategy(overrides=overrides, plan=mk.Plan(tensor=styles, blocks=blocks))  # type: ignore[arg-type]
    before = hash(made)
    overrides["layers.1"] = BlockOverride(offload=False)
    styles["down"] = mk.plan.row()
    blocks.append("more")
    assert made.plan is not None
    assert made.overrides == ONE and made.plan.tensor == {"up": mk.plan.column()} and made.plan.blocks == ("layers.*",)
    assert hash(made) == before


@pytest.mark.parametrize("change", ["a[0] = 1", "del a['layers.0']", "a.clear()", "a.update(b=1)", "a._items['b'] = 1"])
def test_overrides_cannot_be_changed_in_place(change: str) -> None:
    made = Strategy(overrides=ONE)
    with pytest.raises((TypeError, AttributeError)):
        exec(change, {"a": made.overrides})
    assert made.overrides == ONE


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: mk.Plan(blocks="layers.*"), r"Plan\(blocks='layers.\*'\): a list of patterns, not one text"),  # type: ignore[arg-type]
        (lambda: mk.Plan(attention=[3]), r"Plan\(attention=\[3\]\): 3 is no pattern"),  # type: ignore[list-item]
        (lambda: mk.Plan(units=None), r"Plan\(units=None\): a list of patterns"),  # type: ignore[arg-type]
        (lambda: mk.Plan(tensor=None), r"Plan\(tensor=None\): give a table"),  # type: ignore[arg-type]
        (lambda: mk.Plan(tensor={"a": "column"}), r"Plan\(tensor=...\): 'a' is 'column', which is no Style"),  # type: ignore[dict-item]
        (lambda: mk.Plan(init={"a": 0.02}), r"Plan\(init=...\): 'a' is 0.02, which is no Init"),  # type: ignore[dict-item]
        (lambda: Strategy(overrides={3: BlockOverride(offload=False)}), "3 is no pattern"),  # type: ignore[dict-item]
        (lambda: PipelinePolicy(schedule=3), r"PipelinePolicy\(schedule=3\)"),
    ],
)
def test_a_record_of_other_things_is_refused(make: Any, error: str) -> None:
    with pytest.raises(mk.errors.PlanError, match=error):
        make()
