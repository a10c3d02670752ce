from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForSequenceClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM

from meshkit.__main__ import main
from meshkit.models import RewardModel, config_from_pretrained, load_pretrained
from tests.recipes.launch import ROOT, command_line, read_losses, run
from tests.recipes.pairs import write_pairs

RECIPE = "examples/reward_model.py"
TOL_FP32_SUM = 2e-5  # relative; another mesh sums in another order, and steps amplify it
TOL_FP32 = 1e-5
WAIT_S = 300


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


def flags(pairs: tuple[Path, Path], out: Path, **changes: object) -> list[str]:
    chosen = {
        "data": pairs[0],
        "tokenizer": pairs[1],
        "held-out": 0.2,
        "out": out,
        "language-steps": 0,
        "steps": 4,
        "seq-len": 96,
        "global-batch": 6,
        "lr-kind": "constant",  # or the first part of a run would depend on how long the whole is to be
        "warmup-steps": 2,
        "eval-every": 2,
    }
    return command_line(chosen, **changes)


def seen_last(out: Path) -> dict[str, float]:
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_run_continued_on_another_mesh_is_one_run_and_transformers_reads_it(
    pairs: tuple[Path, Path], tmp_path: Path
) -> None:
    """2 steps as a language model and 2 with cp, then 2 with tp, have the losses of one rank; pp reads the folder too."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    status, output = run(1, RECIPE, *flags(pairs, whole, language_steps=2), "--margin", timeout_s=WAIT_S)
    assert status == 0, output
    for mesh, steps in (("cp=2", 2), ("tp=2", 4)):
        changes = {"mesh": mesh, "steps": steps, "microbatches": 2, "language_steps": 2}
        status, output = run(2, RECIPE, *flags(pairs, parts, **changes), "--margin", timeout_s=WAIT_S)
        assert status == 0, output
    assert "resume from step 2" in output and "even" in output and "odd" in output
    losses = read_losses(whole)
    assert sorted(losses) == [1, 2, 3, 4]
    assert read_losses(parts) == pytest.approx(losses, rel=TOL_FP32_SUM)
    ours, theirs = seen_last(whole), seen_last(parts)
    for name in ("held_out/accuracy", "held_out/margin", "held_out/loss", "train/margin", "train/accuracy"):
        assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-5)
    assert ours["tokens_per_s"] > 0 and {"held_out_accuracy/even", "held_out_accuracy/odd"} <= ours.keys()

    folder = parts / "model-4"
    reference = LlamaForSequenceClassification.from_pretrained(folder, pad_token_id=0)
    model = RewardModel(config_from_pretrained(folder))
    load_pretrained(model, folder)
    ids = torch.randint(1, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (model(ids)[:, -1:] - reference(input_ids=ids).logits).abs().max() < TOL_FP32

    again = flags(
        (pairs[0], folder), tmp_path / "again", pretrained=folder, mesh="pp=2", steps=1, warmup_steps=1, lr=1e-9
    )
    status, output = run(2, RECIPE, *again, "--margin", timeout_s=WAIT_S)
    assert status == 0, output
    assert seen_last(tmp_path / "again")["held_out/loss"] == pytest.approx(ours["held_out/loss"], rel=1e-4)


def test_a_language_model_with_experts_gets_a_score(pairs: tuple[Path, Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3MoeConfig(vocab_size=330, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, **sizes, **heads)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "language")
    for ranks, mesh in ((1, ""), (2, "dp_shard=2 ep=2")):
        changes = {"pretrained": tmp_path / "language", "mesh": mesh, "steps": 2}
        status, output = run(ranks, RECIPE, *flags(pairs, tmp_path / str(ranks), **changes), timeout_s=WAIT_S)
        assert status == 0, output
    assert read_losses(tmp_path / "2") == pytest.approx(read_losses(tmp_path / "1"), rel=TOL_FP32_SUM)
    written = json.loads((tmp_path / "2" / "model-2" / "config.json").read_text())
    assert written["architectures"] == ["Qwen3MoeForSequenceClassification"]


@pytest.mark.parametrize("recipe", [RECIPE, "examples/dpo.py"])
def test_a_recipe_can_be_estimated(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["estimate", str(ROOT / recipe), "--mesh", "dp_shard=2", "--seq-len", "64", "--global-batch", "2"]
    monkeypatch.setattr(sys, "argv", ["meshkit", *words])
    main()
    assert "parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"held_out": 1e-6}, "leaves 60 rows to learn from and 0 to evaluate on"),
        ({"center": -1, "held_out": 0.2}, "--center -1.0: give a number that is at least 0"),
    ],
)
def test_a_mistake_ends_the_run_with_its_text(
    pairs: tuple[Path, Path], tmp_path: Path, change: dict, match: str
) -> None:
    status, output = run(1, RECIPE, *flags(pairs, tmp_path, **change), timeout_s=WAIT_S)
    assert status != 0
    assert match in output, output
