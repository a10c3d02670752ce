"""Every recipe of post-training in small: models, data and flags of a step that a warm rank takes in seconds."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from meshkit.data import load_tokenizer
from tests.recipes.launch import command_line
from tests.recipes.pairs import write_pairs

MESHES = {"one": "dp_shard=1", "tp": "tp=2", "pp": "pp=2", "ep": "dp_shard=2 ep=2", "cp": "cp=2"}
SHARED = {"precision": "bf16", "seq-len": 64, "warmup-steps": 0, "eval-every": 1, "lr": 1e-4}
ROLLOUTS = {"max-new-tokens": 4, "prompts": 4, "samples": 2, "held-out": 0.1, "eval-prompts": 2, "steps": 1}
RECIPES: dict[str, dict[str, object]] = {
    "sft": {"global-batch": 4, "steps": 1},
    "dpo": {"global-batch": 4, "steps": 1},
    "reward_model": {"global-batch": 4, "steps": 1},
    "grpo": {**ROLLOUTS, "entropy": 0.01, "kl": 0.1},
    "ppo": {**ROLLOUTS, "kl": 0.1, "critic-warmup": 0},
    "rejection_sampling": {
        **{name: value for name, value in ROLLOUTS.items() if name != "steps"},
        "global-batch": 4,
        "rounds": 1,
        "threshold": 0.0,
    },
}


def write_inputs(folder: Path) -> Path:
    """Folders `dense` and `experts` of models with one tokenizer, and data of each kind."""
    pairs, tokenizer = write_pairs(folder)
    sizes = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    models = {
        "dense": LlamaForCausalLM(LlamaConfig(**sizes)),
        "experts": MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4)),
    }
    for name, model in models.items():
        # About half of the answers end by themselves: PPO's critic alone teaches nothing about those that are cut.
        with torch.no_grad():
            model.model.embed_tokens.weight += 0.02
            model.lm_head.weight[load_tokenizer(tokenizer).eos_id] += 0.3
        model.save_pretrained(folder / name)
        for file in tokenizer.iterdir():
            (folder / name / file.name).write_bytes(file.read_bytes())
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    answered = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answered))
    return folder


def step_of(recipe: str, flags: list[str]) -> None:
    """`main` of the recipe in this rank: the world is there already."""
    before, sys.argv = sys.argv, [recipe, *flags]
    try:
        importlib.import_module(f"examples.{recipe}").main()
    finally:
        sys.argv = before


def flags_of(recipe: str, mesh: str, inputs: Path, out: Path) -> list[str]:
    data = "pairs.jsonl" if recipe in ("dpo", "reward_model") else "prompts.jsonl"
    given = {"pretrained": inputs / ("experts" if mesh == "ep" else "dense"), "data": inputs / data, "out": out}
    return command_line({**SHARED, **RECIPES[recipe]}, mesh=MESHES[mesh], **given)
