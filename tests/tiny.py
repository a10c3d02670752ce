"""Tiny models of tests: a test says what differs from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from meshkit.models import DeepseekV3Config, LlamaConfig

TINY = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
)
TINY_DEEPSEEK = DeepseekV3Config(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    moe_intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    kv_lora_rank=8,
    q_lora_rank=None,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    first_k_dense_replace=1,
)


def tiny_config(**changed: Any) -> LlamaConfig:
    """Two layers of 16 features, four query and two key/value heads, a vocabulary of 32, with these fields changed."""
    return replace(TINY, **changed)


def tiny_deepseek(**changed: Any) -> DeepseekV3Config:
    """Latent attention of four heads, a dense layer and one of four experts, with these fields changed."""
    return replace(TINY_DEEPSEEK, **changed)


def draw_parameters(model: nn.Module, *, std: float = 0.2) -> None:
    """Norms away from 1 and biases away from 0, or their errors would not show."""
    for param in model.parameters():
        nn.init.normal_(param, std=std) if param.ndim > 1 else nn.init.uniform_(param, 0.5, 1.5)
