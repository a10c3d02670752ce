"""What is computed: FLOPs equal the closed form of papers, and a thin model is traced as the whole one is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.metrics import ModelFlops
from meshkit.preflight.forecast import ModelProfile, profile_model
from meshkit.preflight.forecast._trace import OpTrace
from meshkit.program import read_program
from meshkit.resolve import resolve
from tests.tiny import tiny_config, tiny_deepseek

ROWS, TOKENS = 2, 16
RING = mk.strategy.ContextPolicy(scheme="ring")


def profiled(model: nn.Module, mesh: str = "dp_shard=1", **choices: Any) -> ModelProfile:
    strategy = mk.Strategy(mesh=mesh, **choices)
    resolved = resolve(read_program(model), strategy, strategy.mesh_for())
    return profile_model(resolved, rows=ROWS, seq_len=TOKENS, kernels="cpu")


def on_meta(config: Any, kind: Any = mk.models.Llama) -> nn.Module:
    with mk.models.meta_parameters():
        model: nn.Module = kind(config)
    return model


CONFIG = tiny_config(num_hidden_layers=3)


@pytest.mark.parametrize(
    ("mesh", "choices"),
    [
        ("dp_shard=1", {}),
        ("dp_shard=8", {"zero": 2}),
        ("tp=2", {}),
        ("tp=2", {"sequence": True}),
        ("pp=3 dp_replicate=2 tp=2", {"sequence": True}),
        ("dp_shard=1", {"memory": mk.MemoryPolicy(recompute="full")}),
        ("dp_shard=1", {"memory": mk.MemoryPolicy(recompute="selective")}),
        ("dp_shard=1", {"memory": mk.MemoryPolicy(precision=mk.strategy.Precision())}),
        ("dp_shard=2", {"compile": True}),
    ],
    ids=str,
)
def test_flops_of_a_step_are_those_of_its_formula(mesh: str, choices: dict[str, Any]) -> None:
    profile = profiled(on_meta(CONFIG), mesh, **choices)
    expected = ModelFlops.from_config(CONFIG).per_token(TOKENS).full * ROWS * TOKENS
    assert profile.flops * mk.MeshSpec.parse(mesh).tp == expected


@pytest.mark.parametrize(
    "changed", [{"tie_word_embeddings": True}, {"num_key_value_heads": 4}, {"attention_bias": True}]
)
def test_flops_of_a_family_are_those_of_its_formula(changed: dict[str, Any]) -> None:
    config = replace(CONFIG, **changed)
    expected = ModelFlops.from_config(config).per_token(TOKENS).full * ROWS * TOKENS
    assert profiled(on_meta(config)).flops == expected


@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=2 ep=2"])
def test_flops_of_experts_are_those_of_its_formula(mesh: str) -> None:
    config = mk.models.MixtralConfig(
        **{**vars(CONFIG), "num_hidden_layers": 2}, num_local_experts=4, num_experts_per_tok=2
    )
    expected = ModelFlops.from_config(config).per_token(TOKENS).full * ROWS * TOKENS
    model = on_meta(config, mk.models.Mixtral)
    assert profiled(model, mesh, plan=mk.models.model_plan(config)).flops == expected


def test_weights_gradients_are_a_phase_of_their_own() -> None:
    """Two FLOPs for each token and weight, whatever splits them; attention has no weights."""
    products = ModelFlops.from_config(CONFIG).matmul_params
    for mesh, choices in (("dp_shard=1", {}), ("tp=2", {"sequence": True}), ("tp=2", {})):
        profile = profiled(on_meta(CONFIG), mesh, **choices)
        parts = [*profile.blocks.values(), *profile.around.values()]
        weight = sum(part.flops("weight") for part in parts) * mk.MeshSpec.parse(mesh).tp
        assert weight == 2 * products * ROWS * TOKENS, mesh


class Grouped(nn.Module):
    """Two experts; where the rows of each end is known beforehand, so that no operator of the step makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 16, 32, device="meta"))
        self.ends = torch.empty(2, dtype=torch.int32, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.grouped_mm(x, self.weight, offs=self.ends)


def test_weights_gradients_of_experts_are_a_phase_of_their_own() -> None:
    model = Grouped().bfloat16()  # torch 2.11 multiplies groups of nothing else
    with OpTrace(model, [""]) as trace:
        x = torch.empty(8, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) * 2
        model(x).square().sum().backward()
    (profile,) = trace.profiles().values()
    assert Counter(op.phase for op, _ in profile.ops if op.kind == "matmul") == {
        "forward": 1,
        "backward": 1,
        "weight": 1,
    }


def test_full_recompute_runs_a_block_again_up_to_its_last_saved_tensor() -> None:
    profile = profiled(on_meta(CONFIG), memory=mk.MemoryPolicy(recompute="full"))
    block = profile.blocks["layers.1"]
    down = 2 * CONFIG.intermediate_size * CONFIG.hidden_size * ROWS * TOKENS
    assert block.flops("recompute") == block.flops("forward") - down
    assert profiled(on_meta(CONFIG)).blocks["layers.1"].flops("recompute") == 0


def test_ring_attention_computes_what_the_mask_lets_through() -> None:
    """Between the causal half and the whole square, and more ranks come nearer to the half."""
    per_token = ModelFlops.from_config(CONFIG).per_token(TOKENS)
    ratios = []
    for ranks in (2, 4):
        flops = profiled(on_meta(CONFIG), f"cp={ranks}", context=RING).flops * ranks / (ROWS * TOKENS)
        assert per_token.causal < flops < per_token.full
        ratios.append(flops)
    assert ratios[0] > ratios[1]


class Odd(nn.Module):
    """Knows its blocks by their numbers, and is no decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.head = nn.Linear(8, 32, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for index in range(4):
            x = x + self.layers[index](x)
        out: Tensor = self.head(x)
        return out


def test_a_users_module_is_traced_also_where_blocks_have_numbers() -> None:
    with torch.device("meta"):
        model = Odd()
    profile = profiled(model, plan=mk.Plan(tensor={}, blocks=("layers.*",)))
    assert profile.flops == 6 * (4 * 8 * 8 + 8 * 32) * ROWS * TOKENS
    assert list(profile.blocks) == [f"layers.{index}" for index in range(4)]


def test_a_block_of_another_width_is_another_kind() -> None:
    """The first dense layer of a model of experts is traced by itself."""
    config = tiny_deepseek(num_hidden_layers=3)
    profile = profiled(on_meta(config, mk.models.DeepseekV3), plan=mk.models.model_plan(config))
    flops = [block.flops() for block in profile.blocks.values()]
    assert flops[0] != flops[1] == flops[2]


def test_a_compiler_leaves_fewer_kernels_and_fewer_bytes() -> None:
    eager, fused = (profiled(on_meta(CONFIG), compile=compiled).blocks["layers.0"] for compiled in (False, True))
    size = [sum(op.bytes * count for op, count in each.ops if op.kind == "memory") for each in (eager, fused)]
    assert size[1] < size[0] / 2 and fused.launches["forward"] < eager.launches["forward"] / 2
    assert fused.flops() == eager.flops()
