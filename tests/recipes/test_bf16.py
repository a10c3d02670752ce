"""Every recipe of post-training takes a step in bf16 on one rank, and with tp, pp, ep and cp: in ranks that are warm."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.depth import thin
from tests.recipes.small import MESHES, RECIPES, flags_of, step_of, write_inputs
from tests.world import pool

CELLS = [(recipe, mesh) for recipe in RECIPES for mesh in MESHES]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


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
