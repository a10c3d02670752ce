"""The tiny decoder of tests: a test says what differs from it."""

from __future__ import annotations

from typing import Any

from meshkit.models import LlamaConfig

TINY = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
)


def tiny_config(**changed: Any) -> LlamaConfig:
    """Two layers of 16 features, four query and two key/value heads, a vocabulary of 32, with these fields changed."""
    return LlamaConfig(**{**vars(TINY), **changed})
