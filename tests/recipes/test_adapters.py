"""Policies that are adapters (LoRA): written by generators, learnt, referred to and exported, on any mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.depth import thin
from tests.recipes.launch import command_line
from tests.recipes.small import MESHES, flags_of, step_of, write_inputs
from tests.world import RankError, pool

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft asks transformers for it
]

POLICIES = ("grpo", "ppo", "rejection_sampling")
ADAPTERS = {"lora-rank": 4, "lr": 1e-2, "precision": "fp32"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def run_small(recipe: str, on: str, inputs: Path, out: Path, *more: str, **changes: object) -> list[dict[str, float]]:
    """The lines of metrics.jsonl."""
    flags = [*flags_of(recipe, on, inputs, out), *command_line({**ADAPTERS, **changes}), *more]
    pool(1 if on == "one" else 2).run(step_of, recipe, flags)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(1, 33)[None]).logits


@pytest.mark.parametrize(("recipe", "mesh"), thin([(r, m) for r in POLICIES for m in MESHES], 3))
def test_a_policy_of_adapters_learns_and_is_exported_as_one(
    recipe: str, mesh: str, inputs: Path, tmp_path: Path
) -> None:
    steps = {"rounds" if recipe == "rejection_sampling" else "steps": 2}
    lines = run_small(recipe, mesh, inputs, tmp_path / "out", **steps)
    assert len(lines) == 2
    base = inputs / ("experts" if mesh == "ep" else "dense")
    plain = logits(AutoModelForCausalLM.from_pretrained(base))
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out/adapter-2")
    assert (logits(theirs) - plain).abs().max() > 1e-3
    with theirs.disable_adapter():
        assert torch.equal(logits(theirs), plain)


@pytest.mark.parametrize("mesh", ["one", "tp", "pp"])
def test_the_reference_is_the_policy_without_its_adapters(mesh: str, inputs: Path, tmp_path: Path) -> None:
    """In the first step it is the policy, so the divergence is 0, and afterwards it is not."""
    first, *_, last = run_small("grpo", mesh, inputs, tmp_path / "out", steps=4, kl=0.1)
    assert abs(first["reference_kl"]) < 1e-6 < 1e-4 < last["reference_kl"]


def test_a_sampler_apart_writes_with_the_adapters_that_learn(inputs: Path, tmp_path: Path) -> None:
    changes = {"steps": 2, "mesh": "dp_shard=1", "sampler-mesh": "dp_shard=1", "sampler-ranks": 1}
    lines = run_small("grpo", "tp", inputs, tmp_path / "out", **changes)
    assert all(line["rollout_gap_max"] < 1e-5 for line in lines)  # so what writes is what learns


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--lora-dropout", "0.1"), "lora-dropout 0.1: answers are written without"),
        (("--lora-base", "int8", "--lora-rank", "None"), "there are none without lora_rank"),
    ],
)
def test_what_adapters_cannot_be_is_refused(flags: tuple[str, ...], match: str, inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=match):
        run_small("grpo", "one", inputs, tmp_path / "out", *flags)
