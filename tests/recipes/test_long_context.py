from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.recipes.launch import command_line, read_losses, run

RECIPE = "examples/long_context.py"
TOL_FP32_SUM = 2e-5  # relative; another mesh sums in another order, and steps amplify it


def flags(corpus: Path, out: Path, **changes: object) -> list[str]:
    chosen = {
        "data": corpus,
        "out": out,
        "cache": corpus.parent / "cache",
        "steps": 6,
        "seq-len": 300,
        "window": 64,
        "warmup-steps": 2,
        "lr-kind": "constant",  # or the first part of a run would depend on how long the whole is to be
        "save-every": 100,
        "eval-every": 100,
        "eval-batches": 2,
    }
    return command_line(chosen, **changes)


def test_a_run_continued_with_another_cp_is_one_run_without_cp(corpus: Path, tmp_path: Path) -> None:
    """3 steps with the tokens on three ranks and 3 on another mesh have the losses of 6 steps on one rank."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    status, output = run(1, RECIPE, *flags(corpus, whole))
    assert status == 0, output
    table = buckets(output)
    status, output = run(3, RECIPE, *flags(corpus, parts, mesh="cp=3", steps=3))
    assert status == 0, output
    assert "cp=3: " in output and "work max/mean" in output
    status, output = run(4, RECIPE, *flags(corpus, parts, mesh="dp_shard=2 cp=2", scheme="ring"))
    assert status == 0, output
    assert "resume from step 3" in output
    losses = read_losses(whole)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    # The warm-up overshoots (a gradient of 38 in step 5), which multiplies what rounding leaves: 2.3e-5 on some processors.
    assert read_losses(parts) == pytest.approx(losses, rel=5 * TOL_FP32_SUM)
    assert list(table) == ["0-16", "16-64", "64-256"]  # no held-out document is longer
    assert buckets(output) == {name: pytest.approx(row, abs=2e-3) for name, row in table.items()}  # 3 decimals shown
    assert (parts / "model-6" / "model.safetensors").exists()


def buckets(output: str) -> dict[str, list[float]]:
    """position -> [labels, loss, loss of the window]."""
    rows = re.findall(r"^ *([\d,]+-[\d,]+) +([\d,]+) +([\d.]+) +([\d.]+) \(", output, re.MULTILINE)
    return {name: [float(labels.replace(",", "")), float(loss), float(near)] for name, labels, loss, near in rows}
