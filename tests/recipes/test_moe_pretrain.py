from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshkit.data import find_corpus, prepare_tokenizer
from meshkit.models import LlamaConfig, save_config
from tests.depth import thin
from tests.recipes.launch import command_line, read_losses, run

RECIPE = "examples/moe_pretrain.py"
TOL_ONE_RANK = 2e-5  # relative; sums are in another order, and steps amplify it
STEPS, LAYERS, EXPERTS, CELL_PX = 12, 4, 8, 12


def flags(corpus: Path, out: Path, **changes: object) -> list[str]:
    chosen = {
        "data": corpus,
        "out": out,
        "cache": corpus.parent / "cache",
        "steps": STEPS,
        "seq-len": 64,
        "global-batch": 6,
        "lr-kind": "constant",  # whose rates do not depend on the number of steps
        "warmup-steps": 4,
        "picture-every": 4,
        "eval-every": 6,
        "sample-tokens": 8,
    }
    return command_line(chosen, **changes)


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("meshes", "balance"),
    thin(
        [
            (("dp_shard=2 ep=2", "tp=2 ep=2"), {"balance_loss": "global", "z_loss": 1e-4}),
            (("pp=2", "dp_shard=2 etp=2"), {"balance_loss": "sequence", "bias_speed": 0}),
        ],
        2,
    ),
)
def test_losses_and_loads_are_those_of_one_rank_on_any_mesh_and_across_a_stop(
    corpus: Path, tmp_path: Path, meshes: tuple[str, str], balance: dict
) -> None:
    status, output = run(1, RECIPE, *flags(corpus, tmp_path / "one", **balance))
    assert status == 0, output
    for mesh, steps in zip(meshes, (5, STEPS), strict=True):
        status, output = run(2, RECIPE, *flags(corpus, tmp_path / "two", mesh=mesh, **{**balance, "steps": steps}))
        assert status == 0, output
    assert "resume from step 5" in output
    losses = read_losses(tmp_path / "one")
    assert list(losses) == list(range(1, STEPS + 1)) and losses[STEPS] < losses[1] - 0.5
    assert read_losses(tmp_path / "two") == {
        step: pytest.approx(loss, rel=TOL_ONE_RANK) for step, loss in losses.items()
    }
    names = {"load/max_over_mean", "load/max_over_mean_worst_layer", "load/entropy", "load/unused_experts"}
    names |= {f"load_by_layer/layers.{layer}.mlp.gate" for layer in range(LAYERS)}
    names |= {"auxiliary/balance"} | ({"auxiliary/z"} if "z_loss" in balance else set())
    for one, two in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"), strict=True):
        assert names == {name for name in two if "/" in name}
        for name in names:
            assert two[name] == pytest.approx(one[name], rel=0.05, abs=1e-6), (
                one["step"],
                name,
            )  # a tie goes either way
        assert 1 <= two["load/max_over_mean"] <= two["load/max_over_mean_worst_layer"] <= EXPERTS / 2
    assert (tmp_path / "two" / f"model-{STEPS}" / "model.safetensors").exists() == ("bias_speed" in balance)
    board = EventAccumulator(str(tmp_path / "one" / "tensorboard")).Reload()
    (tag,) = board.Tags()["images"]
    assert [(one.step, one.width, one.height) for one in board.Images(tag)] == [
        (step, EXPERTS * CELL_PX, LAYERS * CELL_PX) for step in (4, 8, 12)
    ]


def test_what_a_capacity_drops_is_logged(corpus: Path, tmp_path: Path) -> None:
    status, output = run(2, RECIPE, *flags(corpus, tmp_path, mesh="dp_shard=2 ep=2", capacity=1.0, steps=5))
    assert status == 0, output
    assert all(0 < row["load/dropped_share"] < 0.8 for row in rows_of(tmp_path))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mesh": "dp_shard=2 ep=3"}, "ep=3"),
        ({"capacity": 0}, "--capacity 0.0: give a number that is more than 0"),
        ({"bias_speed": -0.01}, "--bias-speed -0.01: give a number that is at least 0"),
        (
            {"mesh": "cp=2", "balance_loss": "sequence"},
            "balances each sequence, but cp=2 gives ranks tokens of several",
        ),
        ({"balance_loss": "expert"}, "expert"),
    ],
)
def test_a_mistake_ends_every_rank_with_its_text(corpus: Path, tmp_path: Path, change: dict, match: str) -> None:
    status, output = run(2, RECIPE, *flags(corpus, tmp_path, **change), timeout_s=60)
    assert status != 0
    assert match in output, output


def test_a_folder_without_experts_is_refused(corpus: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
    save_config(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2), tmp_path)
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    prepare_tokenizer(find_corpus(corpus), tmp_path / "cache", vocab_size=300)
    tokenizer = next((tmp_path / "cache").glob("tokenizer-*"))
    status, output = run(1, RECIPE, *flags(corpus, tmp_path / "out", pretrained=tmp_path, tokenizer=tokenizer))
    assert status != 0
    assert "is a LlamaConfig; this recipe trains Qwen3-MoE and Mixtral" in output, output
