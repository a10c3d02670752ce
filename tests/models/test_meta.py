"""Models built without memory for parameters keep the values that only constructors know."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from meshkit.models import load_pretrained, meta_parameters

from .families import FAMILIES, logits_of, token_ids, transformers_model


@pytest.mark.parametrize("family", ["llama31", "tied", "qwen3"])
def test_a_transformers_model_filled_from_a_folder_is_the_saved_model(family: str, tmp_path: Path) -> None:
    """Its rotary frequencies, which the folder does not hold, included."""
    oracle = transformers_model(family)
    oracle.save_pretrained(tmp_path)
    with meta_parameters():
        model = transformers.AutoModelForCausalLM.from_config(oracle.config)
    assert all(param.is_meta for param in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == bool(
        FAMILIES[family][1].get("tie_word_embeddings")
    )
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(param, device="cpu")))
    model.tie_weights()
    load_pretrained(model, tmp_path)
    assert torch.equal(logits_of(model, token_ids(), None), logits_of(oracle, token_ids(), None))


def test_a_parameter_registered_twice_stays_one_and_keeps_requires_grad() -> None:
    with meta_parameters():
        shared = nn.Parameter(torch.ones(3), requires_grad=False)
        first, second = nn.Module(), nn.Module()
        first.weight, second.weight = shared, shared
        second.register_parameter("bias", None)
    assert second.bias is None
    assert first.weight is second.weight
    assert first.weight.is_meta
    assert not first.weight.requires_grad


def test_it_ends_with_its_block_also_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="stop"), meta_parameters():
        raise RuntimeError("stop")
    assert not nn.Linear(2, 2).weight.is_meta
