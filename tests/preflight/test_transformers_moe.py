"""What is said beforehand of transformers' mixtures of experts: bytes as they are sent, and a step and its memory as of one
product for all experts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import meshkit as mk
from meshkit.preflight.explain import Message
from tests.laws.parity.test_bytes import seen_and_said
from tests.world import pool
from tests.zoo import causal
from tests.zoo.shrink import VOCABULARY

SMALL = 1000
"""bytes; larger gathers are of parameters"""


def of_experts(kind: str, spec: str) -> list[Counter[tuple[str, int]]]:
    """The messages of tokens and routing weights that were sent, and that were said."""
    torch.manual_seed(0)
    run = mk.parallelize(causal.build(kind), mk.init_mesh(spec))
    ids = torch.arange(2 * 16).view(2, -1) % VOCABULARY

    def chosen(messages: Counter[Message]) -> Counter[tuple[str, int]]:
        found = Counter[tuple[str, int]]()
        for message, times in messages.items():
            if message.op == "all_to_all":  # how many go where is the router's affair
                found["all_to_all", 0] += message.size * times
            elif message.op == "all_gather" and message.size < SMALL:
                found["all_gather", message.size] += times
        return found

    return [*map(chosen, seen_and_said(run, {"input_ids": ids, "labels": ids}, microbatches=1))]


@pytest.mark.parametrize("spec", ["dp_shard=2 ep=2", "tp=2"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_of_a_token_are_counted_by_what_experts_are_given(kind: str, spec: str) -> None:
    for seen, said in pool(2).run(of_experts, kind, spec):
        assert seen == said and seen


def mixtral(chosen: int) -> MixtralForCausalLM:
    sizes = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with mk.models.meta_parameters():
        return MixtralForCausalLM(
            MixtralConfig(**sizes, **heads, num_local_experts=8, num_experts_per_tok=chosen)
        ).bfloat16()


@pytest.mark.parametrize("spec", ["dp_shard=2 ep=2", "dp_shard=2 ep=1 etp=2"])
def test_a_step_is_forecast_as_of_one_product_for_all_experts(spec: str) -> None:
    """One product for each row, which copies weights for it, was said to take 14 times as long."""
    batch, model = mk.Batch(sequences=4, seq_len=2048), mixtral(2)
    whole, split = (mk.forecast(model, mk.Strategy(mesh=mesh), "h100", batch) for mesh in ("dp_shard=2", spec))
    assert split.profile.flops == pytest.approx(whole.profile.flops, rel=0.01)
    assert split.seconds < 2 * whole.seconds
    held = [mk.estimate(model, mesh, rows=2, seq_len=2048, kernels="cuda").peak_bytes for mesh in ("dp_shard=2", spec)]
    assert held[1] < 1.3 * held[0], held
