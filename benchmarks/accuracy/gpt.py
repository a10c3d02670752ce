"""GPT as Megatron-LM, DeepSpeed and llm-foundry train it: LayerNorm, one projection to q, k and v, GELU, a tied head.

A module of plain PyTorch that meshkit has never seen. Attention is `fused` (flash) or, as it was before, scores that are
written to memory. Positions are left out: they cost nothing that shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshkit.plan import Plan, attention, column, enter, row, sequence, vocab


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    fused: bool


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim, self.fused = config.hidden // config.heads, config.fused
        self.q_proj = nn.Linear(config.hidden, config.hidden)
        self.k_proj = nn.Linear(config.hidden, config.hidden)
        self.v_proj = nn.Linear(config.hidden, config.hidden)
        self.o_proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q, k, v = (
            each(x_BTC).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) * self.head_dim**-0.5
            tokens = scores.shape[-1]
            hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device).triu(1)
            out = torch.matmul(scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden, config.ffn)
        self.down_proj = nn.Linear(config.ffn, config.hidden)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_BTC)))


class Layer(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.input_norm(x_BTC))
        return x_BTC + self.mlp(self.mlp_norm(x_BTC))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BTC = self.embed_tokens(input_ids)
        for layer in self.layers:
            x_BTC = layer(x_BTC)
        logits: Tensor = self.lm_head(self.norm(x_BTC))
        return logits


GPT_PLAN = Plan(
    tensor={
        "embed_tokens": vocab(),
        "layers.*.{input,mlp}_norm": sequence(),
        "layers.*.attention": attention(),
        "layers.*.attention.{q,k,v}_proj": column(),
        "layers.*.attention.o_proj": row(),
        "layers.*.mlp": enter(),
        "layers.*.mlp.up_proj": column(),
        "layers.*.mlp.down_proj": row(),
        "norm": sequence(),
        "lm_head": vocab(),
    },
    blocks=("layers.*",),
)
