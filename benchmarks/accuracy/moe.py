"""Mixtures of experts of published rows, as their configurations have them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM

import meshkit as mk

CONFIGS = {
    # Without the module that predicts further ahead: most rows train without.
    "DeepSeek-V3": replace(mk.models.DEEPSEEK_V3, num_nextn_predict_layers=0),
    "Qwen3-30B-A3B": mk.models.QWEN3_30B_A3B,
    "Qwen3-235B-A22B": replace(
        mk.models.QWEN3_30B_A3B,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=94,
        num_attention_heads=64,
        moe_intermediate_size=1536,
    ),
    "GPT-OSS-120B": GptOssConfig(num_hidden_layers=36, num_local_experts=128),
}
LAYERS = {name: config.num_hidden_layers for name, config in CONFIGS.items()}


def moe_model(name: str) -> nn.Module:
    """On meta but for its buffers, as the bias of a router, which are zeros."""
    config = CONFIGS[name]
    with torch.device("meta"):
        if isinstance(config, GptOssConfig):
            model: nn.Module = GptOssForCausalLM(config)
        else:
            model = (mk.models.DeepseekV3 if name == "DeepSeek-V3" else mk.models.Qwen3Moe)(config)
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, torch.zeros_like(buffer, device="cpu"))
    return model


def moe_plan(name: str) -> mk.Plan | None:
    config = CONFIGS.get(name)
    return None if config is None or isinstance(config, GptOssConfig) else mk.models.model_plan(config)
