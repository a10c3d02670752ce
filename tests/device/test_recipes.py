"""Every recipe trains and evaluates on the device `late`: tensors of the host and of the device meet in none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.device.world import run
from tests.recipes.launch import command_line, write_corpus
from tests.recipes.small import RECIPES, flags_of, step_of, write_inputs

pytestmark = [pytest.mark.gate, pytest.mark.turns(8)]
TEXT = {
    "steps": 2,
    "warmup-steps": 1,
    "eval-every": 1,
    "eval-batches": 1,
    "save-every": 2,
    "seq-len": 64,
    "global-batch": 2,
}
OF_TEXT: dict[str, dict[str, object]] = {
    "llama_pretrain": {"offload": "host"},
    "moe_pretrain": {},
    "long_context": {},
    "diloco_pretrain": {"every": 1},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("recipe", OF_TEXT)
def test_a_recipe_of_text_runs_on_a_device(recipe: str, corpus: Path, tmp_path: Path) -> None:
    flags = command_line({**TEXT, **OF_TEXT[recipe]}, data=corpus, cache=tmp_path / "cache", out=tmp_path / "out")
    assert run(1, step_of, recipe, flags) == [(None, [])]
    losses = [json.loads(line).get("loss") for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert losses and all(loss is None or math.isfinite(loss) for loss in losses)


def step_in_one_order(recipe: str, flags: list[str]) -> bool:
    step_of(recipe, flags)
    found = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    return found


def test_a_replay_on_a_device_adds_in_one_order(corpus: Path, tmp_path: Path) -> None:
    flags = command_line({**TEXT, "corruption-every": 1, "replay-every": 1, "adam-states": "8bit"}, data=corpus)
    paths = command_line({}, cache=tmp_path / "cache", out=tmp_path / "out")
    assert run(1, step_in_one_order, "llama_pretrain", [*flags, *paths]) == [(True, [])]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_post_training_runs_on_a_device(recipe: str, inputs: Path, tmp_path: Path) -> None:
    # In fp32: packed rows in bf16 have a kernel of CUDA's alone.
    flags = [*flags_of(recipe, "one", inputs, tmp_path / "out"), "--precision", "fp32"]
    assert run(1, step_of, recipe, flags) == [(None, [])]
    (line,) = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert math.isfinite(line["loss"])


def test_distillation_runs_on_a_device(inputs: Path, tmp_path: Path) -> None:
    flags = {"task": "reversal", "sft-steps": 2, "steps": 2, "warmup-steps": 0, "prompts": 4, "seq-len": 32}
    flags |= {"eval-every": 1, "eval-prompts": 2, "top": 5, "out": tmp_path / "out"}
    assert run(1, step_of, "distill", command_line(flags)) == [(None, [])]
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
