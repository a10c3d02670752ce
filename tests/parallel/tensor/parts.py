"""Small modules that plans are derived for: fused layers, numbers and parameters of heads, a norm over all features."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HEAD, VOCABULARY = 16, 4, 4, 64


class Attention(nn.Module):
    """Fused q, k and v, a number for each head, and views by numbers of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD)
        self.sharpness = nn.Parameter(torch.linspace(0.5, 1.5, HEADS))
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (each.view(rows, tokens, self.num_heads, HEAD).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * self.sharpness[:, None, None]
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, tokens, self.num_heads * HEAD)
        return self.out(mixed)


class Normed(nn.Module):
    """A norm over all features between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 24), nn.LayerNorm(24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


class Gated(nn.Module):
    """A gate and what it multiplies from one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Spread(nn.Module):
    """Two linear layers in two children, the second with a residual and a norm, as encoders have them."""

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.norm = nn.Linear(24, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
            return self.norm(self.dense(hidden) + x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU()), self.Second()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x), x)


class Relative(nn.Module):
    """Attention with a number for each head and distance."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.distances = nn.Embedding(3, HEADS)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (
            each.view(rows, tokens, self.num_heads, HEAD).transpose(1, 2)
            for each in (self.q(x), self.k(x / 2), self.v(x))
        )
        place = torch.arange(tokens, device=x.device)
        scores = q @ k.mT + self.distances((place[:, None] - place).clamp(-1, 1) + 1).permute(2, 0, 1)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(WIDTH), part

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(self.norm(x))


class Model(nn.Module):
    def __init__(self, *parts: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(part()) for part in parts)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)
