"""Hand-written decoders that take a `mask`, as context parallelism asks of them, and do something else along the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tests.zoo.decoders import LONGEST, WIDTH, Attention, Block, Plain


class MaskedAttention(Attention):
    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = self.heads(x)
        if mask is None:
            out = rearrange(
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), "b h t d -> b t h d"
            )
        else:
            out = mask.attend(*(rearrange(each, "b h t d -> b t h d") for each in (q, k, v)))
        return self.o_proj(rearrange(out, "b t h d -> b t (h d)"))


class MaskedBlock(Block):
    attention = MaskedAttention

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        x = x + self.self_attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Masked(Plain):
    block = MaskedBlock

    def enter(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        return x

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Any = None) -> Tensor:
        x = self.enter(self.embed_tokens(input_ids), position_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.lm_head(self.norm(x))


class MaskedPositions(Masked):
    """Learned positions, those that the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(LONGEST, WIDTH)

    def enter(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        return x + self.positions(torch.arange(x.shape[1]) if position_ids is None else position_ids)


class MaskedOwnPositions(MaskedPositions):
    """Learned positions, counted from the tokens that the model sees."""

    def enter(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        return x + self.positions(torch.arange(x.shape[1]))


class MaskedConvolution(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

    def enter(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        return x + self.conv(F.pad(x.mT, (2, 0))).mT


def masked(mixes: Callable[[Tensor], Tensor]) -> type[Masked]:
    """A decoder with this function of [rows, tokens, features] before its blocks."""
    return type("MaskedMixes", (Masked,), {"enter": lambda self, x, position_ids: mixes(x)})


MaskedScale = masked(lambda x: (x * 3).tanh())
MaskedSum = masked(lambda x: x + x.cumsum(1) / 10)
MaskedShift = masked(lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1])
MaskedMean = masked(lambda x: x - x.mean(1, keepdim=True))
MaskedFirst = masked(lambda x: x + x[:, :1])
MaskedFlip = masked(lambda x: x + x.flip(1))
MaskedCount = masked(lambda x: x if x.shape[1] > 10 else x * 2)
MaskedChunks = masked(lambda x: torch.cat([part - part.mean(1, keepdim=True) for part in x.split(8, 1)], 1))
