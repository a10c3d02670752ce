"""Presets: configurations of public models, from the config.json files that their authors published."""

from __future__ import annotations

from dataclasses import replace

from meshkit.models.deepseek import DeepseekV3Config
from meshkit.models.layers import Llama3Scaling, Rope, YarnScaling
from meshkit.models.llama import LlamaConfig
from meshkit.models.moe import MixtralConfig, Qwen3MoeConfig

LLAMA2_7B = LlamaConfig(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=4096,
)

LLAMA3_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rope=Rope(theta=500_000.0),
)

# It differs from the 8B in these sizes alone: head_dim, kv heads, vocabulary and rope are the same.
LLAMA3_70B = replace(
    LLAMA3_8B, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64
)

LLAMA31_405B = replace(
    LLAMA3_8B,
    hidden_size=16_384,
    intermediate_size=53_248,
    num_hidden_layers=126,
    num_attention_heads=128,
    max_position_embeddings=131_072,
    rope=Rope(
        theta=500_000.0,
        scaling=Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
    ),
)

_LLAMA32_ROPE = Rope(
    theta=500_000.0,
    scaling=Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
)

LLAMA32_1B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
    max_position_embeddings=131_072,
    rope=_LLAMA32_ROPE,
)

LLAMA32_3B = replace(LLAMA32_1B, hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, head_dim=128)

QWEN2_0_5B = LlamaConfig(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=131_072,
    attention_bias=True,
    rope=Rope(theta=1_000_000.0),
)

QWEN2_7B = replace(
    QWEN2_0_5B,
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    head_dim=128,
    tie_word_embeddings=False,
)

QWEN3_0_6B = LlamaConfig(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=40_960,
    qk_norm=True,
    rope=Rope(theta=1_000_000.0),
)

QWEN3_8B = replace(
    QWEN3_0_6B,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    tie_word_embeddings=False,
)

# Version 0.1: later ones have no window and a rope of 1e6.
MISTRAL_7B = LlamaConfig(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=32_768,
    sliding_window=4096,
)

MIXTRAL_8X7B = MixtralConfig(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=32_768,
    num_local_experts=8,
    num_experts_per_tok=2,
    rope=Rope(theta=1_000_000.0),
)

QWEN3_30B_A3B = Qwen3MoeConfig(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    rms_norm_eps=1e-6,
    max_position_embeddings=40_960,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    rope=Rope(theta=1_000_000.0),
)

# Its published number of parameters leaves out the module that predicts further ahead, which this shape has.
DEEPSEEK_V3 = DeepseekV3Config(
    vocab_size=129_280,
    hidden_size=7168,
    intermediate_size=18_432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    num_attention_heads=128,
    n_routed_experts=256,
    num_experts_per_tok=8,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    num_nextn_predict_layers=1,
    max_position_embeddings=163_840,
    rope=Rope(scaling=YarnScaling(factor=40.0, original_max_position_embeddings=4096, attention_factor=1.0)),
    mscale_all_dim=1.0,
)
