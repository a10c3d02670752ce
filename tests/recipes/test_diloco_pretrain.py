from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.recipes.launch import command_line, read_losses, run

RECIPE = "examples/diloco_pretrain.py"


def flags(corpus: Path, out: Path, **changes: object) -> list[str]:
    chosen = {
        "data": corpus,
        "out": out,
        "cache": corpus.parent / "cache",
        "steps": 10,
        "every": 4,
        "seq-len": 64,
        "global-batch": 6,
        "warmup-steps": 4,
        "save-every": 3,
        "keep": 9,
        "eval-every": 5,
        "sample-tokens": 8,
    }
    return command_line(chosen, **changes)


@pytest.mark.parametrize(
    ("ranks", "choices"),
    [
        (2, {"mesh": "dp_replicate=2"}),
        (4, {"mesh": "dp_replicate=2 tp=2", "fragments": 2, "delay": 1, "mixing": 0.5, "wire": "int4"}),
    ],
)
def test_a_run_that_goes_on_within_a_period_has_the_losses_of_one_straight_through(
    ranks: int, choices: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    status, output = run(ranks, RECIPE, *flags(corpus, tmp_path, **choices), "--explain")
    assert status == 0, output
    assert re.search(r"dp_replicate=2: DiLoCo\(every=4.*a period of 4 steps sends", output), output
    assert "bits per byte" in output and (tmp_path / "model-10" / "model.safetensors").exists()
    straight = read_losses(tmp_path)
    assert len(straight) == 10 and straight[10] < straight[1]
    for replica in range(2):
        for step in (6, 9, 10) if replica else (9, 10):  # of step 6 one replica has none, as if the job had been killed
            shutil.rmtree(tmp_path / "checkpoints" / f"replica-{replica}" / f"step-{step:08}")
    shutil.rmtree(tmp_path / "model-10")
    status, output = run(ranks, RECIPE, *flags(corpus, tmp_path, **choices))
    assert status == 0, output
    assert "resume from step 3" in output
    assert read_losses(tmp_path) == straight


def test_a_signal_is_asked_for_at_meetings_alone(corpus: Path, tmp_path: Path) -> None:
    status, output = run(2, RECIPE, *flags(corpus, tmp_path, mesh="dp_replicate=2", steps=40), stop=(tmp_path, 2))
    assert status == 0, output
    saved = re.search(r"saved step (\d+)", output)
    assert saved and int(saved[1]) % 4 == 0, output


def test_other_algorithms_train_and_what_does_not_fit_ends_with_a_line(corpus: Path, tmp_path: Path) -> None:
    for name in ("co2", "local-sgd"):
        chosen = flags(corpus, tmp_path / name, mesh="dp_replicate=2", algorithm=name, steps=5, every=2)
        status, output = run(2, RECIPE, *chosen)
        assert status == 0, output
        losses = read_losses(tmp_path / name)
        assert losses[5] < losses[1]
    status, output = run(2, RECIPE, *flags(corpus, tmp_path / "x", mesh="dp_replicate=2", fragments=3, every=4))
    assert status != 0 and "fragments=3): fragments meet at even distances" in output, output
