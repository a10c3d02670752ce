"""--replan: a run whose steps are not as forecast goes on with the best strategy of the cluster as it was measured."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Timer

import pytest

from examples.llama_pretrain import Config
from meshkit.errors import PlanError
from meshkit.recipes.replanning import without_flags
from meshkit.strategy import Strategy
from tests.recipes.launch import command_line, finish, start

RECIPE = "examples/llama_pretrain.py"


def test_flags_that_are_searched_leave_the_command_line() -> None:
    words = [
        "--mesh",
        "tp=2",
        "--model=demo",
        "--no-sequence",
        "--lr",
        "1e-3",
        "--zero=2",
        "--data",
        "a",
        "b",
        "--sequence",
    ]
    assert without_flags(words, ("mesh", "sequence", "zero")) == ["--model=demo", "--lr", "1e-3", "--data", "a", "b"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--replan", "0.2"], "--replan 0.2 with no --forecast"),
        (["--replan", "0.2", "--forecast", "cpu", "--move-at", "3"], "--replan 0.2 with --move-at 3"),
    ],
)
def test_replan_needs_a_forecast_alone(flags: list[str], said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        Config.parse(flags).move_strategy()


@pytest.mark.timeout(400)
def test_a_run_moves_to_what_is_faster(corpus: Path, tmp_path: Path) -> None:
    sizes = {"seq-len": 32, "global-batch": 4, "eval-every": 100_000, "save-every": 100_000, "steps": 100_000}
    flags = sizes | {"data": corpus, "cache": corpus.parent / "cache", "mesh": "tp=2", "recompute": "full"}
    process = start(2, RECIPE, *command_line(flags, out=tmp_path, forecast="cpu", replan=0.01))
    late = Timer(360, process.terminate)
    late.start()
    said: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        said += [line] if re.match(r"--replan|move before|.*Error", line) else []
        # The move is printed right after the sentence; a run that stays prints none.
        if said and (not said[0].startswith("--replan") or len(said) == 2 or "stays" in said[0]):
            break
    process.terminate()  # torchrun hands it on: the ranks save, and leave
    _, output = finish(process)
    late.cancel()
    found = re.match(r"--replan: \S+ is forecast (\S+) s a step, which now takes (\S+) s", said[0])
    assert found, (said, output)
    strategy = Strategy.read(tmp_path / "strategy.toml")
    assert str(strategy.mesh) != "tp=2" and strategy.microbatches == 1
    if float(found[1]) < 0.95 * float(found[2]):
        assert len(said) == 2 and said[1].startswith("move before step"), (said, output)
