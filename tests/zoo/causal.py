"""Every causal language model of the installed transformers, tiny: built by `shrink`, with a line for the special ones."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import model_type_to_module_name as module_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo.shrink import EXPERTS, tiny, without_randomness

# By the model's type: fields that cannot be shrunk by their names alone.
CHANGED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {  # its layers with a window have sizes of their own
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 12,
        "swa_kv_lora_rank": 10,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 6,
        "indexer_compress_ratio": 2,
    },
    "reformer": {  # without layers that hash by random vectors
        "attn_layers": ["local", "local"],
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [12, 20],
        "num_hidden_layers": 2,
    },
    "xmod": {"default_language": "en_XX"},
}
# Whose own cache raises when they train, on one device too.
WITHOUT_CACHE = ("bamba", "dory", "granitemoehybrid", "hrm_text", "recurrent_gemma", "xlstm")
# Why a type is no decoder of token ids that can be built here.
SKIPPED: dict[str, str] = {
    "blt": "takes bytes, cut into patches by a second model",
    "gemma4_assistant": "drafts tokens for another model, whose cache it reads",
    "gemma4_unified_assistant": "drafts tokens for another model, whose cache it reads",
    "gemma3n": "needs the package timm",
    "musicgen": "no input_ids of one sequence: rows of codebooks, and an encoder of text",
    "musicgen_melody": "no input_ids of one sequence: rows of codebooks, and an encoder of text",
}


@cache
def types() -> dict[str, str]:
    """Type of each model -> its class, each class once."""
    kinds: dict[str, list[str]] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        kinds.setdefault(name, []).append(kind)
    # Of several types the one that has the class in a module of its own; of those the last, which is that of text alone.
    return {
        [kind for kind in of if len(of) == 1 or hasattr(_module(kind), name)][-1]: name for name, of in kinds.items()
    }


def names() -> list[str]:
    return [kind for kind in types() if kind not in SKIPPED]


def build(kind: str, **changed: Any) -> nn.Module:
    """The model in the default dtype, with values that are the same in every call. changed: fields of its config."""
    made = model_class(kind)
    config = tiny(made.config_class or CONFIG_MAPPING[kind], **_changed(kind) | changed)
    torch.manual_seed(3)
    model = made(config).to(torch.get_default_dtype())
    without_randomness(model)
    return fill(model).train()


def fill(model: nn.Module) -> nn.Module:
    """Values that are the same in every call, large enough that every part of the model shows in its output."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            if not param.is_floating_point() or not param.numel():
                continue
            if param.ndim > 1:
                param.copy_(noise / param.shape[-1] ** 0.5)
            else:  # around what it begins with: norms around 1, decays where they are stable
                param.add_(noise, alpha=0.1)
    return model


def has_experts(kind: str) -> bool:
    """Whether the config tells of experts, without the model's code."""
    config = config_of(kind)
    experts = [
        vars(config).get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    ]
    return EXPERTS in experts or hasattr(config, "ffn_config")


def config_of(kind: str) -> PretrainedConfig:
    """Of its text, without the model's code."""
    return tiny(CONFIG_MAPPING[kind], **_changed(kind)).get_text_config()


def _changed(kind: str) -> dict[str, Any]:
    return {**CHANGED.get(kind, {}), **({"use_cache": False} if kind in WITHOUT_CACHE else {})}


def model_class(kind: str) -> type[nn.Module]:
    found: type[nn.Module] = getattr(_module(kind), types()[kind])
    return found


def _module(kind: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{module_of(kind)}")
