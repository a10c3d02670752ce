"""--forecast: what a run says of its own step, beside what was forecast of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshkit.errors import PlanError
from meshkit.preflight.forecast import MeasuredStep, Told
from tests.recipes.launch import command_line, run

RECIPE = "examples/llama_pretrain.py"
TOLD = Told(seconds=2.0, by_axis={"computing": 1.5, "tp": 0.5}, device="d", level="datasheet")


def test_the_largest_difference_has_a_name() -> None:
    measured = MeasuredStep(seconds=4.0, by_axis={"computing": 1.75, "tp": 0.25, "pp": 2.0})
    assert TOLD.beside(measured) == (
        "forecast 2 s a step, measured 4 s: the forecast is -50% off; most in waiting on pp, forecast 0 s, measured 2 s"
    )
    assert "measured 1 s: the forecast is +100% off" in TOLD.beside(MeasuredStep(seconds=1.0))
    assert Told.from_json(TOLD.to_json()) == TOLD
    with pytest.raises(PlanError, match="no forecast's file"):
        Told.from_json('{"seconds": 1}')


@pytest.mark.parametrize(
    ("cluster", "status", "said"),
    [
        (
            "cpu",
            0,
            r"^forecast \S+ s a step, measured \S+ s: the forecast is [+-]\d+% off; most in (waiting|computing)",
        ),
        ("cpuu", 1, r"cluster 'cpuu': there is no such file or datasheet"),
    ],
)
def test_a_recipe_says_it(corpus: Path, tmp_path: Path, cluster: str, status: int, said: str) -> None:
    flags = {"data": corpus, "out": tmp_path, "cache": corpus.parent / "cache", "steps": 20, "seq-len": 32}
    more = {"global-batch": 4, "eval-every": 100, "save-every": 100, "sample-tokens": 4, "mesh": "dp_shard=2"}
    found, output = run(2, RECIPE, *command_line(flags | more, forecast=cluster))
    assert found == status, output
    assert re.search(said, output, re.MULTILINE), output
