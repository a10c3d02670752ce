"""The recipe of PPO is one run wherever its models are, with answers that are pending when it stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.recipes.launch import command_line, run
from tests.recipes.small import flags_of, step_of, write_inputs
from tests.world import pool

RECIPE = "examples/ppo.py"
TOL_CURVE = (
    1e-4  # relative; fp32 sums in another order, and steps amplify it: so few of them that every draw is the same
)


def flags(out: Path, **changes: object) -> list[str]:
    chosen = {
        "task": "reversal",
        "out": out,
        "sft-steps": 110,
        "steps": 4,
        "lr": 1e-4,
        "critic-warmup": 0,
        "warmup-steps": 0,
        "prompts": 6,
        "samples": 3,
        "minibatches": 2,
        "seq-len": 32,
        "kl": 0.05,
        "preset": "DECOUPLED_PPO",
        "staleness": 1,
        "eval-every": 4,
        "eval-prompts": 16,
    }
    return command_line(chosen, **changes)


def curve(out: Path) -> dict[int, list[float]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = ("value_loss", "loss", "reward", "policy/reference_kl", "critic/return")
    return {row["step"]: [row.get(name, 0.0) for name in names] for row in rows}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank."""
    out = tmp_path_factory.mktemp("ppo") / "whole"
    status, output = run(1, RECIPE, *flags(out), timeout_s=280)
    assert status == 0, output
    return out


def other_run(whole: Path, out: Path) -> Path:
    """A folder of a run with the same first model."""
    out.mkdir()
    (out / "sft-model").symlink_to(whole / "sft-model")
    return out


def assert_same_curve(out: Path, whole: Path) -> None:
    found, expected = curve(out), curve(whole)
    assert found.keys() == expected.keys() == {1, 2, 3, 4}
    assert all(map(any, zip(*expected.values(), strict=True)))
    for step in expected:
        assert found[step] == pytest.approx(expected[step], rel=TOL_CURVE, abs=1e-6), step


def test_a_run_on_ranks_apart_stopped_and_continued_elsewhere_is_one_run_on_one_rank(
    whole: Path, tmp_path: Path
) -> None:
    """Learners on two ranks and a sampler on a third; then all on tp=2, with the sampler on its own layout."""
    split = other_run(whole, tmp_path / "split")
    apart = {"mesh": "dp_shard=2", "sampler_mesh": "dp_shard=1", "sampler_ranks": 1}
    status, output = run(3, RECIPE, *flags(split, **apart), timeout_s=280, stop=(split, 2))
    assert status == 0, output
    assert "moves" in output and "lower bound" in output  # the plan of the weights
    status, output = run(2, RECIPE, *flags(split, mesh="tp=2", sampler_mesh="dp_shard=2"), timeout_s=280)
    assert status == 0, output
    assert "resume from step" in output
    assert_same_curve(split, whole)
    AutoModelForCausalLM.from_pretrained(split / "model-4")
    assert list((split / "tensorboard").iterdir())


def test_critic_and_reference_on_meshes_of_their_own_are_the_same_run(whole: Path, tmp_path: Path) -> None:
    """Actor, critic, reference and sampler on a rank each; then layouts of their own on the actor's ranks."""
    split = other_run(whole, tmp_path / "split")
    one = dict.fromkeys(("mesh", "critic-mesh", "reference-mesh", "sampler-mesh"), "tp=1")
    one |= {f"{name}-ranks": 1 for name in ("critic", "reference", "sampler")}
    status, output = run(4, RECIPE, *flags(split, **one), timeout_s=280, stop=(split, 2))
    assert status == 0, output
    others = {"mesh": "tp=2", "critic-mesh": "dp_shard=2", "reference-mesh": "pp=2"}
    status, output = run(2, RECIPE, *flags(split, **others), timeout_s=280)
    assert status == 0, output
    assert "resume from step" in output and "actor, sampler  2 ranks" in output
    assert_same_curve(split, whole)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"critic-ranks": 1}, "--critic-ranks 1 needs a --critic-mesh of so many ranks"),
        ({"critic-mesh": "tp=2", "critic-ranks": 2}, "--critic-ranks 2 of 2 ranks leave none to learn."),
        ({"kl": 0, "reference-mesh": "tp=2"}, "without --kl there is no reference model. Give a --kl"),
        ({"preset": "GRPO"}, "--preset GRPO is not a loss with a critic. Choose from PPO, DECOUPLED_PPO"),
        ({"sampler-ranks": 1}, "--sampler-ranks 1 needs a --sampler-mesh of so many ranks"),
    ],
)
def test_a_mistake_ends_with_its_text(tmp_path: Path, change: dict, match: str) -> None:
    status, output = run(2, RECIPE, *flags(tmp_path, **change), timeout_s=100)
    assert status != 0
    assert match in output, output


def test_a_stream_that_stops_goes_on_elsewhere_with_all_its_rollouts(tmp_path: Path) -> None:
    """Tokens of a bounded age on each of the steps; what is learnt when depends on speed, so no curve is held."""
    streams = {
        "sft_steps": 20,
        "sampler_mesh": "dp_shard=1",
        "sampler_ranks": 1,
        "staleness": 3,
        "steps": 6,
        "eval_every": 3,
    }
    chosen = flags(tmp_path / "run", **streams)
    status, output = run(
        3, RECIPE, *chosen, "--mesh", "dp_shard=2", "--stream", timeout_s=280, stop=(tmp_path / "run", 2)
    )
    assert status == 0 and "streaming, tokens at most 3 updates old" in output, output
    status, output = run(2, RECIPE, *chosen, "--mesh", "dp_shard=1", "--stream", timeout_s=280)
    assert status == 0, output
    rows = curve(tmp_path / "run")
    assert sorted(rows) == [1, 2, 3, 4, 5, 6] and all(row[1] != 0 for row in rows.values())


def test_what_a_stream_needs_is_said(tmp_path: Path) -> None:
    for change, text in (
        ({"staleness": 2}, "--stream needs --sampler-ranks of its own."),
        (
            {"staleness": 0, "sampler_mesh": "dp_shard=1", "sampler_ranks": 1},
            "--stream needs a --staleness of at least 1",
        ),
        (
            {"staleness": 1, "sampler_mesh": "dp_shard=1", "sampler_ranks": 1, "reference-mesh": "tp=1"},
            "--stream has one mesh that writes and one that learns. Leave --reference-mesh and --critic-mesh out.",
        ),
    ):
        status, output = run(2, RECIPE, *flags(tmp_path, **change), "--stream", timeout_s=280)
        assert status and text in output, output


def test_the_schedule_of_the_policy_begins_after_the_critics_warm_up(tmp_path: Path) -> None:
    """On a rank whose warnings are errors: torch warns of a schedule that goes on before its optimizer."""
    told = {"critic-warmup": 1, "steps": 2, "warmup-steps": 1, "lr": 1e-3, "minibatches": 1, "lr-kind": "constant"}
    (tmp_path / "inputs").mkdir()
    flags = [
        *flags_of("ppo", "one", write_inputs(tmp_path / "inputs"), tmp_path),
        "--precision",
        "fp32",
        *command_line(told),
    ]
    pool(1).run(step_of, "ppo", flags)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("lr") for row in rows] == [None, 1e-3]
