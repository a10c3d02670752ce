"""The recipe of GRPO learns, is sound at a learning rate of 0, and is the same run on every mesh and across a stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipes.launch import command_line, run

RECIPE = "examples/grpo.py"
TOL_CURVE = (
    1e-4  # relative; fp32 sums in another order, and steps amplify it: so few of them that every draw is the same
)


def flags(out: Path, **changes: object) -> list[str]:
    chosen = {
        "task": "reversal",
        "out": out,
        "sft-steps": 20,
        "steps": 4,
        "warmup-steps": 0,
        "lr": 1e-4,
        "prompts": 6,
        "samples": 4,
        "seq-len": 32,
        "eval-every": 4,
        "eval-prompts": 16,
    }
    return command_line(chosen, **changes)


def curve(out: Path) -> dict[int, tuple[float, ...]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "reward", "answer_tokens", "learnt_answers", "uniform_groups")
    return {row["step"]: tuple(row[name] for name in names) for row in rows}


def test_a_run_is_the_same_on_other_meshes_and_across_a_stop(tmp_path: Path) -> None:
    """Stopped by SIGTERM on dp 2 and continued on tp 2, against one rank; with a reference, updates, microbatches and
    DAPO's dynamic sampling: of what is written to as many prompts as it takes, all ranks learn the same groups.
    """
    more = {
        "sft_steps": 110,
        "kl": 0.1,
        "entropy": 0.01,
        "updates": 2,
        "microbatches": 2,
        "tokens_per_microbatch": 96,
        "preset": "DAPO",
        "temperature": 0.9,
    }
    status, output = run(1, RECIPE, *flags(tmp_path / "one", **more), timeout_s=280)
    assert status == 0, output
    split = tmp_path / "split"
    (split / "sft-model").parent.mkdir()
    (split / "sft-model").symlink_to(tmp_path / "one" / "sft-model")
    status, output = run(2, RECIPE, *flags(split, **more, mesh="dp_shard=2"), timeout_s=280, stop=(split, 2))
    assert status == 0, output
    status, output = run(2, RECIPE, *flags(split, **more, mesh="tp=2"), timeout_s=280)
    assert status == 0, output
    assert "resume from step" in output
    found, expected = curve(split), curve(tmp_path / "one")
    assert found.keys() == expected.keys() == {1, 2, 3, 4}
    for step in expected:
        assert found[step] == pytest.approx(expected[step], rel=TOL_CURVE, abs=1e-6), step
    rows = [json.loads(line) for line in (split / "metrics.jsonl").read_text().splitlines()]
    # Dynamic sampling keeps groups wherever they were written, and learning shares their tokens out.
    assert all(row["tokens_max_over_mean"] <= 1.05 and row["microbatches"] % 2 == 0 for row in rows)
    for *_, learnt, uniform in expected.values():
        assert 0 < learnt < 1 and uniform == 0  # groups of one score are written, and not learnt
    assert "held out, 16 prompts" in output
    folder = split / "model-4"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert list((split / "tensorboard").iterdir())


def test_generator_and_trainer_agree_at_a_learning_rate_of_0(tmp_path: Path) -> None:
    status, output = run(2, RECIPE, *flags(tmp_path, mesh="pp=2"), "--selftest", timeout_s=280)
    assert status == 0, output
    assert "selftest passed: ratios are 1" in output


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"preset": "GRPOO"}, "--preset GRPOO is not known. Choose from "),
        ({"preset": "PPO"}, "--preset PPO needs a critic, which this recipe has not"),
        ({"preset": "REMAX"}, "--preset REMAX needs greedy answers as a baseline"),
    ],
)
def test_a_mistake_ends_with_its_text(tmp_path: Path, change: dict, match: str) -> None:
    status, output = run(1, RECIPE, *flags(tmp_path, **change), timeout_s=100)
    assert status != 0
    assert match in output, output


def test_a_sampler_on_ranks_of_its_own_writes_what_the_learners_would(tmp_path: Path) -> None:
    """In step with the learners the run is the one of one rank; as a stream it ends as well, on older answers."""
    status, output = run(1, RECIPE, *flags(tmp_path / "one"), timeout_s=280)
    assert status == 0, output
    for name in ("apart", "stream"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sft-model").symlink_to(tmp_path / "one" / "sft-model")
    apart = {"mesh": "dp_shard=2", "sampler_mesh": "dp_shard=1", "sampler_ranks": 1}
    status, output = run(3, RECIPE, *flags(tmp_path / "apart", **apart), timeout_s=280)
    assert status == 0, output
    one, two = curve(tmp_path / "one"), curve(tmp_path / "apart")
    for step, expected in one.items():
        assert two[step] == pytest.approx(expected, rel=TOL_CURVE, abs=1e-7)
    more = {**apart, "staleness": 2, "correction": "tis"}
    status, output = run(3, RECIPE, *flags(tmp_path / "stream", **more), "--stream", timeout_s=280)
    assert status == 0 and len(curve(tmp_path / "stream")) == 4, output


def test_a_reference_on_a_mesh_of_its_own_is_the_same_run(tmp_path: Path) -> None:
    more = {"kl": 0.1, "updates": 2, "temperature": 0.9}
    status, output = run(1, RECIPE, *flags(tmp_path / "one", **more), timeout_s=280)
    assert status == 0, output
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart" / "sft-model").symlink_to(tmp_path / "one" / "sft-model")
    apart = {"mesh": "dp_shard=2", "reference_mesh": "dp_shard=1", "reference_ranks": 1}
    status, output = run(3, RECIPE, *flags(tmp_path / "apart", **more, **apart), timeout_s=280)
    assert status == 0, output
    one, two = curve(tmp_path / "one"), curve(tmp_path / "apart")
    assert one.keys() == two.keys() == {1, 2, 3, 4}
    for step, expected in one.items():
        assert two[step] == pytest.approx(expected, rel=TOL_CURVE, abs=1e-7)


def test_dynamic_sampling_is_for_learners_that_write(tmp_path: Path) -> None:
    change = {"preset": "DAPO", "mesh": "dp_shard=1", "sampler_mesh": "dp_shard=1", "sampler_ranks": 1}
    status, output = run(2, RECIPE, *flags(tmp_path, **change), timeout_s=280)
    assert status and "dynamic sampling (DAPO) asks again within a step" in output, output
