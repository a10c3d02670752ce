"""The recipe of distillation is one run wherever teacher and student are, on given answers and on the student's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.recipes.launch import command_line, run

RECIPE = "examples/distill.py"
TOL_CURVE = 1e-4  # relative; fp32 sums in another order, and steps amplify it


def flags(out: Path, **changes: object) -> list[str]:
    sizes = {
        "task": "reversal",
        "out": out,
        "sft-steps": 20,
        "steps": 4,
        "warmup-steps": 0,
        "prompts": 6,
        "seq-len": 32,
    }
    return command_line(sizes | {"lr": 1e-3, "eval-every": 4, "eval-prompts": 16, "top": 5}, **changes)


def curve(out: Path) -> dict[int, list[float]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: [row[name] for name in ("loss", "divergence", "tokens")] for row in rows}


def test_a_teacher_apart_and_a_stop_change_nothing(tmp_path: Path) -> None:
    """Then the student, which can answer now, goes on with its own answers."""
    whole, split = tmp_path / "whole", tmp_path / "split"
    status, output = run(1, RECIPE, *flags(whole, staleness=1), timeout_s=280)
    assert status == 0, output
    split.mkdir()
    (split / "sft-model").symlink_to(whole / "sft-model")
    apart = {"mesh": "dp_shard=2", "teacher_mesh": "dp_shard=1", "teacher_ranks": 1, "staleness": 1}
    status, output = run(3, RECIPE, *flags(split, **apart), timeout_s=280, stop=(split, 2))
    assert status == 0, output
    status, output = run(2, RECIPE, *flags(split, mesh="tp=2", teacher_mesh="dp_shard=2", staleness=1), timeout_s=280)
    assert status == 0 and "resume from step" in output, output
    found, expected = curve(split), curve(whole)
    assert found.keys() == expected.keys() == {1, 2, 3, 4}
    for step in expected:
        assert found[step] == pytest.approx(expected[step], rel=TOL_CURVE, abs=1e-6), step
    AutoModelForCausalLM.from_pretrained(split / "model-4")
    models = {"pretrained": whole / "model-4", "teacher": whole / "sft-model"}
    own = ["--on-policy", "--divergence", "reverse", "--top", "0"]
    status, output = run(1, RECIPE, *flags(tmp_path / "own", **models), *own, timeout_s=280)
    assert status == 0, output
    assert all(divergence > 0 for _, divergence, _ in curve(tmp_path / "own").values())


def test_ranks_of_a_teacher_need_a_mesh(tmp_path: Path) -> None:
    status, output = run(2, RECIPE, *flags(tmp_path, teacher_ranks=1), timeout_s=100)
    assert status != 0 and "--teacher-ranks 1 needs a --teacher-mesh of so many ranks" in output, output
