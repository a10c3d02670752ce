"""Tiny random models of transformers, one per family and feature: the oracles of the model tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()  # it remarks on the tiny rope lengths, which are meant

VOCABULARY, TOKENS = 97, 24

# pad_token_id=None: with one, transformers' nn.Embedding drops the gradient of that row.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


def rope(kind: str, **values: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
YARN_FULL = {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False}

# family -> (model_type, what its config adds to SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    "llama31": ("llama", rope("llama3", **LLAMA3_SCALING)),
    "linear": ("llama", rope("linear", factor=2.0)),
    "yarn": ("llama", rope("yarn", **YARN)),
    "yarn_full": ("llama", rope("yarn", **YARN_FULL)),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral_no_window": ("mistral", {"sliding_window": None, "head_dim": 10, "num_attention_heads": 6}),
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,  # transformers does not keep these modules
}
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}
QWEN_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 16}

# The same for models with experts.
MOE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral_window": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 7}),
    "qwen3_moe": ("qwen3_moe", {**QWEN_EXPERTS, "norm_topk_prob": True, "tie_word_embeddings": True}),
    "qwen3_moe_dense_first": ("qwen3_moe", {**QWEN_EXPERTS, "mlp_only_layers": [0], "attention_bias": True}),
    "qwen3_moe_sparse": ("qwen3_moe", {**QWEN_EXPERTS, "decoder_sparse_step": 2}),
    "deepseek": ("deepseek_v3", {**LATENT, **rope("yarn", **DEEPSEEK_YARN)}),
    "deepseek_one_group": ("deepseek_v3", {**LATENT, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "deepseek_plain_queries": (
        "deepseek_v3",
        {**LATENT, "q_lora_rank": None, "rope_interleave": False, "attention_bias": True, "n_shared_experts": 2},
    ),
}


def transformers_model(family: str, seed: int = 0) -> Any:
    """In fp32, with SDPA, with random norms and biases too."""
    model_type, values = (FAMILIES | MOE_FAMILIES)[family]
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **values})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    randomise(model, seed)
    return model.eval()


def randomise(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def token_ids(rows: int = 3, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def packed_positions(*rows: tuple[int, ...]) -> Tensor:
    """Positions of rows that hold documents of these lengths."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


# Three documents, one, and many with some of one token: the rows of a packed batch are not alike.
PACKED = packed_positions((10, 5, 9), (TOKENS,), (1, 1, 6, 1, 15))


def logits_of(model: Any, ids: Tensor, positions: Tensor | None) -> Tensor:
    if not isinstance(model, transformers.PreTrainedModel):
        return model(ids, positions)
    out: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return out
