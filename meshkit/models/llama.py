"""Llama 2/3, Qwen2, Qwen3 and Mistral: one dense decoder (transformer). Single-device code that knows no mesh.

The families differ in a few flags of `LlamaConfig`: biases of q, k, v (Qwen2), norms of q and k (Qwen3), a sliding
window (Mistral). Names of modules and parameters are those of transformers without the leading `model.`.
`Decoder` is all but the layers: models with experts (MoE) have others.
Dims: B batch, T tokens, C hidden_size, H query heads, K key/value heads, D head_dim, R = D/2, V vocabulary.

[Note: what parallelism from outside relies on]
Numbers of heads are read off the tensors, so a rank may hold a part of them. Between blocks the hidden state may hold a
part of the tokens; so rotations and the mask are computed once, in `Llama.forward` from `input_ids`, and handed down by
position after the hidden state, which is always first. There are no buffers, so torch.device("meta") loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.errors import PlanError
from meshkit.mask import Mask
from meshkit.models.layers import (
    GatedMLP,
    KernelMask,
    Rope,
    SplitAttention,
    apply_rope,
    attention,
    attention_mask,
    rope_tables,
)
from meshkit.plan import Plan, column, enter, per_head, row, sequence, vocab
from meshkit.plan import attention as attention_style


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The shape of a decoder, under the field names of Hugging Face's config.json.

    attention_bias: q_proj, k_proj and v_proj have biases. attention_output_bias: o_proj has one too.
    qk_norm: q and k are RMS-normalised over head_dim before the rotation. sliding_window: a query sees that many
    tokens, itself included; None is all. max_position_embeddings is for config.json; nothing here depends on it.
    Raises: PlanError for sizes that do not fit together.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    sliding_window: int | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    qk_norm: bool = False
    rope: Rope = field(default_factory=Rope)

    def __post_init__(self) -> None:
        refuse_odd_sizes(self)
        name = type(self).__name__
        if self.num_attention_heads % self.num_key_value_heads:
            raise PlanError(
                f"{name}: num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; each key/value head serves equally many query heads."
            )
        if self.head_dim % 2:
            raise PlanError(f"{name}: head_dim={self.head_dim} is odd, but rope rotates pairs.")
        if self.attention_output_bias and not self.attention_bias:
            raise PlanError(
                f"{name}: attention_output_bias=True needs attention_bias=True; no family has o_proj's bias alone."
            )


def refuse_odd_sizes(config: Any) -> None:
    """Check that every integer of a config is at least 1, or at least the `least` of its field's metadata.

    Raises: PlanError.
    """
    # By the annotation's text, which is what a dataclass keeps under `from __future__ import annotations`. bool is an
    # int to Python, so True would pass for 1.
    for entry in fields(config):
        value, least = getattr(config, entry.name), entry.metadata.get("least", 1)
        is_integer = entry.type in ("int", "int | None") and value is not None
        if is_integer and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise PlanError(
                f"{type(config).__name__}: {entry.name} must be a whole number of at least {least}, but is {value!r}."
            )
    if config.rms_norm_eps <= 0:
        raise PlanError(f"{type(config).__name__}: rms_norm_eps must be positive, but is {config.rms_norm_eps}.")


class Decoder(nn.Module):
    """Decoder-only transformer: embedding, layers with rotary positions, norm, head.

    With tie_word_embeddings, `lm_head.weight` is `embed_tokens.weight`, one Parameter.
    """

    def __init__(self, config: LlamaConfig, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            # One Parameter under two names: `state_dict` has both, `parameters()` one.
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Mask | SplitAttention | None = None
    ) -> Tensor:
        """input_ids: [B, T]. Returns logits [B, T, V]. The others as in `hidden`."""
        logits_BTV: Tensor = self.lm_head(self.hidden(input_ids, position_ids, mask))
        return logits_BTV

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Mask | SplitAttention | None = None
    ) -> Tensor:
        """What the head sees: the hidden state [B, T, C] after the last norm.

        position_ids: [B, T], for packed documents: a document starts wherever a position is not the one before plus 1,
        and attention does not look back over a start. None: positions 0..T-1, one document per row.
        mask: who sees whom, where that is not what position_ids say; the config's sliding window cuts it as well.
        """
        hidden_BTC = self.embed_tokens(input_ids)
        positions = position_ids
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        # See [Note: what parallelism from outside relies on]: here input_ids are whole, inside of the layers the
        # hidden state may not be.
        cos, sin = rope_tables(self.config.rope, positions, self.config.head_dim, dtype=hidden_BTC.dtype)
        shown = attention_mask(input_ids, position_ids, window=self.config.sliding_window, mask=mask)
        for layer in self.layers:
            hidden_BTC = layer(hidden_BTC, cos, sin, shown)
        normed_BTC: Tensor = self.norm(hidden_BTC)
        return normed_BTC


class Llama(Decoder):
    """Pre-norm, grouped-query attention, SwiGLU in every layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, (dense_layer(config) for _ in range(config.num_hidden_layers)))


def dense_layer(config: LlamaConfig) -> DecoderLayer:
    attention, mlp = Attention(config), GatedMLP(config.hidden_size, config.intermediate_size)
    return DecoderLayer(attention, mlp, hidden_size=config.hidden_size, eps=config.rms_norm_eps)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, *, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=eps)

    def forward(self, x_BTC: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, mask: KernelMask) -> Tensor:
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), cos_BTR, sin_BTR, mask)
        out: Tensor = x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))
        return out


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; optional biases and norms of q and k."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        query_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, hidden, bias=config.attention_output_bias)
        norm = config.qk_norm
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if norm else None

    def forward(self, x_BTC: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, mask: KernelMask) -> Tensor:
        # The number of heads follows from head_dim: under tensor parallelism a projection returns this rank's heads only.
        # See [Note: views where a token is drawn].
        q_BTHD = self.q_proj(x_BTC).unflatten(-1, (-1, self.head_dim))
        k_BTKD = self.k_proj(x_BTC).unflatten(-1, (-1, self.head_dim))
        v_BTKD = self.v_proj(x_BTC).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHD, k_BTKD = self.q_norm(q_BTHD), self.k_norm(k_BTKD)
        q_BTHD, k_BTKD = apply_rope(q_BTHD, cos_BTR, sin_BTR), apply_rope(k_BTKD, cos_BTR, sin_BTR)
        out_BTHD = attention(q_BTHD, k_BTKD, v_BTKD, mask)
        out: Tensor = self.o_proj(out_BTHD.flatten(-2))
        return out


# The tensor-parallel style of each module of `Llama`, its blocks and its FSDP units.

LLAMA_PLAN = Plan(
    tensor={
        "embed_tokens": vocab(),
        # With sequence parallelism each rank of tp has a part of the tokens at the norms; attention and feed-forward
        # enter with a gather and leave with a reduce-scatter.
        "layers.*.input_layernorm": sequence(),
        "layers.*.self_attn": attention_style(),
        "layers.*.self_attn.{q,k,v}_proj": column(),
        "layers.*.self_attn.{q,k}_norm": per_head(optional=True),  # Qwen3
        "layers.*.self_attn.o_proj": row(),
        "layers.*.post_attention_layernorm": sequence(),
        "layers.*.mlp": enter(),
        "layers.*.mlp.{gate,up}_proj": column(),
        "layers.*.mlp.down_proj": row(),
        "norm": sequence(),
        "lm_head": vocab(),
    },
    blocks=("layers.*",),
    # Units of their own: at a vocabulary of 128K each is as large as several blocks, and the root would gather them
    # first and free them last.
    units=("embed_tokens", "lm_head"),
    mlps=("layers.*.mlp",),
)
