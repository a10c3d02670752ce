"""--routing-replay in recipes: a policy with experts learns with it on meshes; others refuse it before training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshkit.errors import PlanError
from meshkit.recipes import CriticFlags, EnvironmentFlags
from tests.recipes.launch import command_line
from tests.recipes.small import RECIPES, SHARED, step_of, write_inputs
from tests.world import pool


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def flags(recipe: str, inputs: Path, out: Path, **changes: object) -> list[str]:
    given = {"pretrained": inputs / "experts", "data": inputs / "prompts.jsonl", "out": out, "precision": "fp32"}
    return command_line({**SHARED, **RECIPES[recipe], **given}, **changes)


def test_a_generator_and_a_trainer_that_replays_agree(inputs: Path, tmp_path: Path) -> None:
    given = flags("grpo", inputs, tmp_path, mesh="tp=2", kl=0.0, routing_replay="rollout")
    pool(2).run(step_of, "grpo", [*given, "--selftest"])


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("grpo", {"mesh": "dp_shard=2 ep=2", "updates": 2, "routing_replay": "old"}),
        (
            "grpo",
            {
                "sampler_mesh": "tp=1",
                "sampler_ranks": 1,
                "staleness": 1,
                "correction": "tis",
                "routing_replay": "rollout",
            },
        ),
        ("ppo", {"mesh": "dp_shard=2 ep=2", "minibatches": 2, "routing_replay": "old"}),
        ("ppo", {"mesh": "pp=2", "minibatches": 2, "routing_replay": "rollout"}),
    ],
)
def test_recipes_replay(recipe: str, changes: dict[str, object], inputs: Path, tmp_path: Path) -> None:
    more = ["--stream"] if "sampler_ranks" in changes else []
    pool(2).run(step_of, recipe, [*flags(recipe, inputs, tmp_path, **changes), *more])
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["loss"] == row["loss"]


def test_what_has_no_experts_or_no_record_is_refused(inputs: Path) -> None:
    with pytest.raises(PlanError, match="--routing-replay old: the small model has no experts. Give --pretrained"):
        EnvironmentFlags(routing_replay="old").policy_loss(critic=False)
    with pytest.raises(PlanError, match="--routing-replay rollout: .*dense has no experts"):
        CriticFlags(preset="PPO", pretrained=inputs / "dense", routing_replay="rollout").policy_loss(critic=True)
    experts = inputs / "experts"
    with pytest.raises(PlanError, match="--routing-replay rollout: --engine vllm does not tell what its routers chose"):
        EnvironmentFlags(pretrained=experts, engine="vllm", routing_replay="rollout").policy_loss(critic=False)
    assert EnvironmentFlags(pretrained=experts, engine="vllm", routing_replay="old").policy_loss(critic=False)
