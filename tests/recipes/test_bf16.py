"""Every recipe of post-training takes a step in bf16 on one rank, and with tp, pp, ep and cp: in ranks that are warm."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from meshkit.data import load_tokenizer
from tests.depth import thin
from tests.recipes.launch import command_line
from tests.recipes.pairs import write_pairs
from tests.world import pool

pytestmark = pytest.mark.turns(4)

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
CELLS = [(recipe, mesh) for recipe in RECIPES for mesh in MESHES]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `dense` and `experts` of models with one tokenizer, and data of each kind."""
    folder = tmp_path_factory.mktemp("bf16")
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


@pytest.mark.parametrize(("recipe", "mesh"), thin(CELLS, 4))
def test_a_step_in_bf16_is_finite(recipe: str, mesh: str, inputs: Path, tmp_path: Path) -> None:
    pool(1 if mesh == "one" else 2).run(step_of, recipe, flags_of(recipe, mesh, inputs, tmp_path))
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert math.isfinite(line["loss"]) and line.get("grad_norm", 1.0) > 0


@pytest.mark.parametrize("mesh", thin([*MESHES], 4))
def test_the_selftest_passes_in_bf16(mesh: str, inputs: Path, tmp_path: Path) -> None:
    pool(1 if mesh == "one" else 2).run(step_of, "grpo", [*flags_of("grpo", mesh, inputs, tmp_path), "--selftest"])


# ----------------------------------------------------------------------------------------- the bound of --selftest


def decode_gap(dtype: torch.dtype, *, hidden: int, layers: int, std: float) -> float:
    """The largest difference of a log-probability in transformers: with its cache, and of the whole sequence at once."""
    torch.manual_seed(1)
    sizes = {"num_hidden_layers": layers, "num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 32}
    config = LlamaConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden, initializer_range=std, **sizes
    )
    model, prompts = LlamaForCausalLM(config).to(dtype).eval(), torch.randint(1, 512, (8, 16))
    counts = {"max_new_tokens": 48, "min_new_tokens": 48}
    options = {"do_sample": True, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    with torch.no_grad():
        out = model.generate(prompts, attention_mask=torch.ones_like(prompts), **counts, **options)
        whole = model(out.sequences).logits[:, 15:-1]
    labels = out.sequences[:, 16:, None]
    one, other = (
        logits.float().log_softmax(-1).gather(-1, labels) for logits in (torch.stack(out.logits, dim=1), whole)
    )
    return float((one - other).abs().max())


def test_the_bound_of_the_selftest_is_what_transformers_differs_from_itself_by() -> None:
    bounds = importlib.import_module("examples.grpo").TOL_GAP
    sizes = {"hidden": 256, "layers": 8, "std": 0.06}
    assert bounds["bf16"] / 2 < decode_gap(torch.bfloat16, **sizes) < bounds["bf16"]
    assert decode_gap(torch.float32, **sizes) < bounds["fp32"]
