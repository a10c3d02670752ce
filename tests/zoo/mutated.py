"""The mutation test: a small decoder whose forward has one to three random edits, drawn by a seed.

An edit puts a function at a place of the forward (before, between and after the blocks, in attention, in the MLP, on the
logits), or changes its shape (blocks repeated, reversed, left out in turn or at random; products fused; residuals in
parallel; parts moved; a branch on a value, a shape or what an earlier call left behind).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tests.zoo.decoders import HEAD_DIM, HIDDEN, LAYERS, WIDTH
from tests.zoo.shrink import VOCABULARY

COUNT = 200
Change = Callable[[Tensor], Tensor]

# Of [..., features]; each keeps the shape.
CHANGES: dict[str, Change] = {
    "scale": lambda x: x / 3,
    "tanh": torch.tanh,
    "square": lambda x: x * x / 4,
    "relu": F.relu,
    "cap": lambda x: 5 * torch.tanh(x / 5),
    "clamp": lambda x: x.clamp(-1, 1),
    "in place": lambda x: x.clone().mul_(0.9).add_(0.1),
    "dropout 0": lambda x: F.dropout(x, 0.0),
    "softmax": lambda x: x * x.softmax(-1),
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms": lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5),
    "by width": lambda x: x / x.shape[-1] ** 0.5,
    "flip features": lambda x: x + x.flip(-1) / 2,
    "roll features": lambda x: x + x.roll(1, -1) / 2,
    "running sum of features": lambda x: x + x.cumsum(-1) / 9,
    "pairs": lambda x: x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
    "halves": lambda x: torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1),
    "sort": lambda x: x + x.sort(-1).values / 3,
    "neighbour token": lambda x: x + F.pad(x, (0, 0, 1, 0))[..., :-1, :] / 2,
    "running sum of tokens": lambda x: x + x.cumsum(-2) / 9,
    "mean of tokens": lambda x: x - x.mean(-2, keepdim=True),
    "positions": lambda x: x + torch.arange(x.shape[-2], dtype=x.dtype).sin()[:, None],
    "first token": lambda x: x + x[..., :1, :],
    "count of tokens": lambda x: x / x.shape[-2],
    "a part": lambda x: torch.cat([x[..., :3].tanh(), x[..., 3:]], -1),
    "detached": lambda x: x + x.detach() / 2,
    "where": lambda x: torch.where(x > 0, x, x / 2),
}
PLACES = (
    *("embedded", "between", "before norm", "logits"),
    *("attention in", "attention out", "mlp in", "mlp out", "block out"),
    *("query", "key", "value", "context", "hidden"),
)
SHAPES = (
    *("reversed", "repeated", "left out", "parallel", "fused", "skip", "skip to blocks", "branch", "tuple", "keyword"),
    *("norm after", "tied", "head bias", "scores", "on shape", "state"),
    *("dropped", "moved", "gated", "branch in blocks", "memory"),
)


class Edits:
    """at: changes by place. shapes: names of SHAPES."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.at: dict[str, list[Change]] = defaultdict(list)
        self.shapes: set[str] = set()
        self.text: list[str] = []
        for _ in range(draw.randint(1, 3)):
            if draw.random() < 0.35:
                shape = draw.choice(SHAPES)
                self.shapes.add(shape)
                self.text.append(shape)
            else:
                place, change = draw.choice(PLACES), draw.choice(list(CHANGES))
                self.at[place].append(CHANGES[change])
                self.text.append(f"{change} at {place}")

    def __call__(self, place: str, x: Tensor) -> Tensor:
        for change in self.at.get(place, ()):
            x = change(x)
        return x


class Attention(nn.Module):
    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self.edits, self.head_dim = edits, HEAD_DIM
        if "fused" in edits.shapes:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.edits("attention in", x)
        fused = "fused" in self.edits.shapes
        projected = self.qkv(x).chunk(3, -1) if fused else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        heads = (rearrange(each, "b t (h d) -> b h t d", d=self.head_dim) for each in projected)
        q, k, v = (self.edits(place, each) for place, each in zip(("query", "key", "value"), heads, strict=True))
        if "scores" in self.edits.shapes:
            scores = q @ k.mT / self.head_dim**0.5
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            out = scores.masked_fill(later, -1e9).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = self.edits("context", rearrange(out, "b h t d -> b t (h d)"))
        return self.edits("attention out", self.o_proj(out))


class Mlp(nn.Module):
    def __init__(self, edits: Edits) -> None:
        super().__init__()
        gated = "gated" in edits.shapes
        self.edits, self.up, self.down = edits, nn.Linear(WIDTH, HIDDEN * (1 + gated)), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.edits("mlp in", x))
        if "gated" in self.edits.shapes:
            gate, hidden = hidden.chunk(2, -1)
            hidden = F.silu(gate) * hidden
        hidden = self.edits("hidden", F.gelu(hidden))
        return self.edits("mlp out", self.down(hidden))


class Block(nn.Module):
    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self.edits, self.norm1, self.norm2 = edits, nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.self_attn, self.mlp = Attention(edits), Mlp(edits)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
        if skip is not None:
            x = x + skip / 4
        if "branch in blocks" in self.edits.shapes and bool(x.detach().mean() > 0):
            x = -x
        if "parallel" in self.edits.shapes:
            out = x + self.self_attn(self.norm1(x)) + self.mlp(self.norm2(x))
        elif "norm after" in self.edits.shapes:
            x = x + self.norm1(self.self_attn(x))
            out = x + self.norm2(self.mlp(x))
        elif "moved" in self.edits.shapes:
            x = x + self.mlp(self.norm2(x))
            out = x + self.self_attn(self.norm1(x))
        else:
            x = x + self.self_attn(self.norm1(x))
            out = x + self.mlp(self.norm2(x))
        out = self.edits("block out", out)
        return (out, out.mean(-1)) if "tuple" in self.edits.shapes else out


class Mutated(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.edits = edits = Edits(seed)
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(edits) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias="head bias" in edits.shapes)
        if "tied" in edits.shapes:
            self.lm_head.weight = self.embed_tokens.weight
        self.calls = 0
        self.before: Tensor | None = None

    def forward(self, input_ids: Tensor) -> Tensor:
        shapes = self.edits.shapes
        x = embedded = self.edits("embedded", self.embed_tokens(input_ids))
        self.calls += 1
        if "on shape" in shapes and input_ids.shape[1] > 12:
            x = x.tanh()
        if "branch" in shapes and (x.detach().sum() > 0 or self.calls > 1):
            x = x * 2
        if "memory" in shapes:
            x = x if self.before is None else x + self.before.mean()
            self.before = x.detach()
        layers = list(self.layers)[:: -1 if "reversed" in shapes else 1]
        for index, layer in enumerate(layers * 2 if "repeated" in shapes else layers):
            if "left out" in shapes and (self.calls + index) % 3 == 0:
                continue
            if "dropped" in shapes and torch.rand(()) < 0.3:
                continue
            given = {"skip": embedded} if "skip to blocks" in shapes else {}
            out = layer(x=x, **given) if "keyword" in shapes else layer(x, **given)
            if "tuple" in shapes:
                x, mean = out
                x = x + mean[..., None] / 9
            else:
                x = out
            if "state" in shapes:
                self.last = x
                x = x + self.last.tanh() / 5
            x = self.edits("between", x)
        if "skip" in shapes:
            x = x + embedded
        return self.edits("logits", self.lm_head(self.norm(self.edits("before norm", x))))


MUTATED = {f"{seed:03}": partial(Mutated, seed) for seed in range(COUNT)}
