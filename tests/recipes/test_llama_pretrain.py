from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.recipes.launch import ROOT, command_line, finish, read_losses, run, start, wait_for_step

RECIPE = "examples/llama_pretrain.py"
GOLDEN = ROOT / "tests" / "golden" / "llama_pretrain.json"
TOL_GOLDEN = 2e-5  # relative; other processors and torch versions sum in another order, and steps amplify it


def flags(corpus: Path, out: Path, **changes: object) -> list[str]:
    chosen = {
        "data": corpus,
        "out": out,
        "cache": corpus.parent / "cache",
        "steps": 12,
        "seq-len": 64,
        "global-batch": 6,
        "warmup-steps": 4,
        "save-every": 100,
        "eval-every": 6,
        "sample-tokens": 8,
    }
    return command_line(chosen, **changes)


def test_first_steps_are_the_golden_ones_on_any_mesh_and_across_a_stop(corpus: Path, tmp_path: Path) -> None:
    """Stopped by SIGTERM on one mesh and continued on another, the losses are those of one run straight through."""
    golden = {int(step): loss for step, loss in json.loads(GOLDEN.read_text()).items()}
    first = start(2, RECIPE, *flags(corpus, tmp_path, mesh="dp_shard=2", microbatches=2))
    wait_for_step(first, tmp_path, 3)
    first.send_signal(signal.SIGTERM)
    _, output = finish(first)
    stopped_at = max(read_losses(tmp_path))
    assert f"saved step {stopped_at}" in output
    status, output = run(2, RECIPE, *flags(corpus, tmp_path, mesh="tp=2"))
    assert status == 0, output
    if stopped_at < 12:
        assert f"resume from step {stopped_at}" in output
    assert read_losses(tmp_path) == {step: pytest.approx(loss, rel=TOL_GOLDEN) for step, loss in golden.items()}
    assert "bits per byte" in output
    assert (tmp_path / "model-12" / "model.safetensors").exists()
    assert list((tmp_path / "tensorboard").iterdir())
    status, output = run(2, RECIPE, *flags(corpus, tmp_path, mesh="tp=2"))
    assert status == 0, output
    assert "has its 12 steps; give more --steps" in output


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mesh": "tp=3"}, "mesh tp=3 needs a multiple of 3 ranks, but the world has 2"),
        ({"mesh": "dp_shrad=2"}, "Did you mean 'dp_shard'?"),
        ({"data": "no/such/*.txt"}, "no/such/*.txt"),
        ({"model": "lama3-8b"}, "lama3-8b"),
    ],
)
def test_a_mistake_ends_every_rank_with_its_text(corpus: Path, tmp_path: Path, change: dict, match: str) -> None:
    status, output = run(2, RECIPE, *flags(corpus, tmp_path, **change), timeout_s=60)
    assert status != 0
    assert match in output, output


def test_an_error_on_one_rank_ends_the_others_with_that_error(tmp_path: Path) -> None:
    """Rank 1 raises while rank 0 waits for it in a collective."""
    status, output = finish(start(2, "tests/recipes/one_rank_fails.py"))
    assert status != 0
    assert "PlanError (rank 1): this rank has had enough" in output, output
