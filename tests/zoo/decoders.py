"""Decoders as people write them by hand, each with one oddity: a plain one, and what differs from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.shrink import VOCABULARY

WIDTH, HIDDEN, HEAD_DIM, LAYERS, LONGEST = 32, 48, 8, 4, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HEAD_DIM
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

    def heads(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values."""
        projected = (each(x) for each in (self.q_proj, self.k_proj, self.v_proj))
        return [rearrange(each, "b t (h d) -> b h t d", d=self.head_dim) for each in projected]

    def forward(self, x: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*self.heads(x), is_causal=True, enable_gqa=True)
        return self.o_proj(rearrange(out, "b h t d -> b t (h d)"))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def between(self, hidden: Tensor) -> Tensor:
        return F.gelu(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class Block(nn.Module):
    attention: type[nn.Module] = Attention
    mlp_type: type[nn.Module] = Mlp

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.self_attn, self.mlp = self.attention(), self.mlp_type()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Plain(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(self.block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, input_ids: Tensor) -> Any:
        return self.lm_head(self.norm(self.body(self.embed_tokens(input_ids))))


# ---------------------------------------------------------------------------------------------------------- around the head


class ScaledHead(Plain):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) / 8


class SoftCap(Plain):
    def forward(self, input_ids: Tensor) -> Tensor:
        return 5 * torch.tanh(super().forward(input_ids) / 5)


class LogSoftmax(Plain):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids).log_softmax(-1) * 0.7


class CentredLogits(Plain):
    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        return logits * (1 - logits.softmax(-1))


class Temperature(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.temperature


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = self.embed_tokens.weight


class HeadByWeight(Plain):
    """The parent uses a child's weight."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.norm(self.body(self.embed_tokens(input_ids))) @ self.embed_tokens.weight.T


class EarlyExits(Plain):
    def forward(self, input_ids: Tensor) -> Tensor:
        x, logits = self.embed_tokens(input_ids), torch.zeros(())
        for layer in self.layers:
            x = layer(x)
            logits = logits + self.lm_head(self.norm(x))
        return logits


class TwoHeads(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.second_head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.norm(self.body(self.embed_tokens(input_ids)))
        return self.lm_head(x) + self.second_head(x.sin())


class ReturnsObject(Plain):
    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(input_ids) * 2, other=input_ids)


# ------------------------------------------------------------------------------------------------------- between the blocks


class TanhBetween(Plain):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class SkipToHead(Plain):
    def body(self, x: Tensor) -> Tensor:
        return super().body(x) + x


class SkipToEvery(Plain):
    def body(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = layer(x) + 0.5 * first
        return x


class SkipAsInUNet(Plain):
    def body(self, x: Tensor) -> Tensor:
        kept = []
        for index, layer in enumerate(self.layers):
            x = layer(x) if index < LAYERS // 2 else layer(x + kept.pop())
            kept += [x] if index < LAYERS // 2 else []
        return x


class BareNorms(Plain):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(F.rms_norm(x, (WIDTH,)))
        return F.layer_norm(x, (WIDTH,))


class OneNorm(Plain):
    """The same norm after every block, and before the head."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        return x


class Repeated(Plain):
    def body(self, x: Tensor) -> Tensor:
        return super().body(super().body(x))


class EachTwice(Plain):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(layer(x))
        return x


class Reversed(Plain):
    def body(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class LastUnused(Plain):
    def body(self, x: Tensor) -> Tensor:
        for layer in list(self.layers)[:-1]:
            x = layer(x)
        return x


class Shared(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = self.layers[0]


class SharedMlp(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].mlp.up = self.layers[0].mlp.up


class ScalarForEach(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.tensor(1.0 + index) for index in range(LAYERS))

    def body(self, x: Tensor) -> Tensor:
        for scale, layer in zip(self.scales, self.layers, strict=True):
            x = x + scale * layer(x)
        return x


class Checkpointed(Plain):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class GradientHook(Plain):
    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        x.register_hook(lambda grad: grad * 3)
        return x


class DetachedHalf(Plain):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + layer(x).detach()
        return x


class InPlace(Plain):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).mul_(0.5).add_(0.1)
        return x


class TwoStreams(Plain):
    def body(self, x: Tensor) -> Tensor:
        left, right = x, x.flip(-1)
        for layer in self.layers:
            left, right = right + layer(left), left
        return left + right


class HyperStreams(Plain):
    """Several residual streams in one tensor of four dims, mixed between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(LAYERS, 3, 3))

    def body(self, x: Tensor) -> Tensor:
        streams = repeat(x, "b t d -> b t s d", s=3)
        for mix, layer in zip(self.mix, self.layers, strict=True):
            streams = torch.einsum("btsd,sr->btrd", streams, mix)
            streams = streams + layer(streams[:, :, 0])[:, :, None]
        return streams.mean(2)
