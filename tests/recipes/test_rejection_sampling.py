"""The recipe of rejection sampling keeps the same answers on every mesh and across a stop, and learns from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipes.launch import command_line, run

RECIPE = "examples/rejection_sampling.py"
TOL_CURVE = (
    1e-4  # relative; fp32 sums in another order, and steps amplify it: so few of them that every draw is the same
)


def flags(out: Path, **changes: object) -> list[str]:
    chosen = {
        "out": out,
        "sft-steps": 50,
        "rounds": 3,
        "prompts": 9,
        "samples": 4,
        "global-batch": 4,
        "lr": 1e-4,
        "seq-len": 32,
        "threshold": 0.0,  # that something is kept of a model that is hardly ever right
        "eval-every": 3,
        "eval-prompts": 16,
    }
    return command_line(chosen, **changes)


def curve(out: Path) -> dict[int, list[float]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: [row[name] for name in ("loss", "reward", "kept", "answer_tokens")] for row in rows}


def test_a_run_is_the_same_on_two_ranks_and_across_a_stop(tmp_path: Path) -> None:
    """Nine prompts are five and four, and answers are kept over both ranks."""
    whole, split = tmp_path / "whole", tmp_path / "split"
    status, output = run(1, RECIPE, *flags(whole), timeout_s=200)
    assert status == 0, output
    split.mkdir()
    (split / "sft-model").symlink_to(whole / "sft-model")
    for rounds, resumes in ((2, False), (3, True)):
        status, output = run(2, RECIPE, *flags(split, mesh="dp_shard=2", rounds=rounds), timeout_s=200)
        assert status == 0, output
        assert ("resume from round 2" in output) == resumes
    found, expected = curve(split), curve(whole)
    assert found.keys() == expected.keys() == {1, 2, 3}
    for step in expected:
        assert expected[step][2] == 9  # one answer of each prompt
        assert found[step] == pytest.approx(expected[step], rel=TOL_CURVE), step
    folder = split / "model-3"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert list((split / "tensorboard").iterdir())


def test_a_round_without_a_right_answer_learns_nothing(tmp_path: Path) -> None:
    status, output = run(1, RECIPE, *flags(tmp_path, rounds=1, threshold=2.0, sft_steps=1, eval_every=1), timeout_s=200)
    assert status == 0, output
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["kept"] == 0 and "loss" not in row
