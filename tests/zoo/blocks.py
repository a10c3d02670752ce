"""Hand-written decoders whose blocks, lists of blocks, or parts of blocks are odd."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tests.zoo.decoders import HIDDEN, LAYERS, LONGEST, WIDTH, Attention, Block, Mlp, Plain
from tests.zoo.shrink import VOCABULARY

# --------------------------------------------------------------------------------------------------- how blocks are called


class TupleBlocks(Plain):
    class block(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.mean(-1)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, mean = layer(x)
            x = x + mean[..., None]
        return x


class DictBlocks(Plain):
    class block(Block):
        def forward(self, x: Tensor) -> Any:
            return {"hidden": super().forward(x)}

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)["hidden"]
        return x


class KeywordBlocks(Plain):
    class block(Block):
        def forward(self, *, hidden: Tensor, scale: float) -> Any:
            return super().forward(hidden) * scale

    def body(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(hidden=x, scale=1 / (1 + index))
        return x


class BlocksWithIds(Plain):
    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, WIDTH)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return super().forward(x + self.table(ids))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, input_ids)
        return self.lm_head(self.norm(x))


class ListedBlocks(Plain):
    """A list of python's, whose blocks are registered under names of their own."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers
        self.stack = [Block() for _ in range(LAYERS)]
        for index, layer in enumerate(self.stack):
            self.add_module(f"layer_{index}", layer)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.stack:
            x = layer(x)
        return x


class NamedBlocks(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Block() for name in ("first", "second", "third")})

    def body(self, x: Tensor) -> Tensor:
        for name in ("second", "first", "third"):
            x = self.layers[name](x)
        return x


class SequentialBlocks(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def body(self, x: Tensor) -> Tensor:
        return self.layers(x)


class NestedBlocks(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(LAYERS // 2))

    def body(self, x: Tensor) -> Tensor:
        for one, two in self.layers:
            x = two(one(x)) + one(x)
        return x


class TwoKinds(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), SandwichBlock(), Block(), SandwichBlock()])


class SandwichBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(self.self_attn(x))
        return x + self.norm2(self.mlp(x))


class ParallelResidual(Plain):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm1(x)
            return x + self.self_attn(normed) + self.mlp(normed) + self.norm2(x)


# ------------------------------------------------------------------------------------------------------- before the blocks


class ScaledTable(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embedding_dim**0.5


class ScaledEmbedding(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = ScaledTable(VOCABULARY, WIDTH)


class LearnedPositions(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(LONGEST, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + self.positions(torch.arange(x.shape[1])))


class PositionParameter(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.rand(LONGEST, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + self.positions[: x.shape[1]])


class TokensAndPositions(nn.Embedding):
    def forward(self, ids: Tensor, positions: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(ids) + scale * torch.sin(positions)[..., None]


class EmbeddingOfMore(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = TokensAndPositions(VOCABULARY, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids, torch.arange(input_ids.shape[1]), scale=2.0)
        return self.lm_head(self.norm(self.body(x)))


class BigramEmbedding(Plain):
    """A second table, of this token and the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Embedding(50, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        pairs = (input_ids * 31 + F.pad(input_ids, (1, 0))[:, :-1]) % 50
        return self.lm_head(self.norm(self.body(self.embed_tokens(input_ids) + self.pairs(pairs))))


# ------------------------------------------------------------------------------- between the linear layers of a feed-forward


def decoder_with(between: Any) -> type[Plain]:
    """A decoder with this function of the hidden features between `up` and `down`."""
    mlp = type("OddMlp", (Mlp,), {"between": lambda self, hidden: between(hidden)})
    return type("WithOddMlp", (Plain,), {"block": type("OddBlock", (Block,), {"mlp_type": mlp})})


SoftmaxBetween = decoder_with(lambda hidden: hidden.softmax(-1) * 9)
NormBetween = decoder_with(lambda hidden: F.layer_norm(hidden, hidden.shape[-1:]))
LargestBetween = decoder_with(lambda hidden: hidden * (hidden >= hidden.topk(6, dim=-1).values[..., -1:]))
FlippedBetween = decoder_with(lambda hidden: hidden.flip(-1) * hidden)
RolledBetween = decoder_with(lambda hidden: F.gelu(hidden) + hidden.roll(1, -1))
CumulativeBetween = decoder_with(lambda hidden: hidden.cumsum(-1) / 10)
MaskedBetween = decoder_with(lambda hidden: F.gelu(hidden) * torch.arange(hidden.shape[-1]).sin())
SlicedBetween = decoder_with(lambda hidden: torch.cat([hidden[..., :11].tanh(), hidden[..., 11:].sigmoid()], -1))
ScaledByNorm = decoder_with(lambda hidden: hidden / (1 + hidden.norm(dim=-1, keepdim=True)))
TokensMixedBetween = decoder_with(lambda hidden: F.gelu(hidden + hidden.roll(1, 1)))


class NormModuleBetween(Plain):
    class block(Block):
        class mlp_type(Mlp):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.LayerNorm(HIDDEN)

            def between(self, hidden: Tensor) -> Tensor:
                return self.norm(F.gelu(hidden))


class FusedGate(Plain):
    class block(Block):
        class mlp_type(Mlp):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

            def between(self, hidden: Tensor) -> Tensor:
                gate, up = hidden.chunk(2, -1)
                return F.silu(gate) * up


class DownIsUp(Plain):
    """One weight for both linear layers."""

    class block(Block):
        class mlp_type(Mlp):
            def __init__(self) -> None:
                super().__init__()
                del self.down

            def forward(self, x: Tensor) -> Tensor:
                return F.gelu(self.up(x)) @ self.up.weight


# ------------------------------------------------------------------------------------------------- odd kinds of attention


class MultiQuery(Plain):
    class block(Block):
        class attention(Attention):
            def __init__(self) -> None:
                super().__init__()
                self.k_proj, self.v_proj = nn.Linear(WIDTH, self.head_dim), nn.Linear(WIDTH, self.head_dim)


class FusedQkv(Plain):
    class block(Block):
        class attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                q, k, v = rearrange(self.c_attn(x), "b t (three h d) -> three b h t d", three=3, h=4)
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                return self.c_proj(rearrange(out, "b h t d -> b t (h d)"))


class ScaledHeads(Plain):
    """A learned scale for each head."""

    class block(Block):
        class attention(Attention):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.rand(WIDTH // self.head_dim) + 0.5)

            def forward(self, x: Tensor) -> Tensor:
                out = super().forward(x)
                return out * self.scale.repeat_interleave(self.head_dim)


class MixedHeads(Plain):
    """Talking heads: attention weights are mixed between heads."""

    class block(Block):
        class attention(Attention):
            def forward(self, x: Tensor) -> Tensor:
                q, k, v = self.heads(x)
                weights = q @ k.repeat_interleave(2, 1).mT / self.head_dim**0.5
                weights = weights.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -1e9).softmax(-1)
                weights = weights + weights.mean(1, keepdim=True)
                return self.o_proj(rearrange(weights @ v.repeat_interleave(2, 1), "b h t d -> b t (h d)"))
