"""Hand-written decoders with backwards of their own, and with odd ways to compute: in place, strided, mapped, scripted."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from meshkit.step import Batch
from tests.zoo.decoders import HEAD_DIM, HIDDEN, LAYERS, WIDTH, Attention, Block, Mlp, Plain

# ------------------------------------------------------------------------------------------------- other in the backward


class _Centred(torch.autograd.Function):
    """As it is in forward; in backward less the mean over a dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad - grad.mean(ctx.dim, keepdim=True), None


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign() * 0.5 + x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e-3, 1e-3)


class BackwardOfFeatures(Plain):
    class block(Block):
        class mlp_type(Mlp):
            def between(self, hidden: Tensor) -> Tensor:
                return F.gelu(_Centred.apply(hidden, -1))


class BackwardOfTokens(Plain):
    def body(self, x: Tensor) -> Tensor:
        return super().body(_Centred.apply(x, 1))


class BackwardOfSummands(Plain):
    """What is not linear in the gradient must not see summands of it."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.self_attn(_Straight.apply(self.norm1(x)))
            return x + self.mlp(_Straight.apply(self.norm2(x)))


class BackwardInHead(Plain):
    """Between the projection and attention, where heads are split."""

    class block(Block):
        class attention(Attention):
            def heads(self, x: Tensor) -> list[Tensor]:
                q, k, v = super().heads(x)
                return [_Straight.apply(q), k, _Centred.apply(v, 1)]


class HookOfFeatures(Plain):
    class block(Block):
        class mlp_type(Mlp):
            def between(self, hidden: Tensor) -> Tensor:
                hidden.register_hook(lambda grad: grad - grad.mean(-1, keepdim=True))
                return F.gelu(hidden)


class HookOfTokens(Plain):
    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        x.register_hook(lambda grad: grad - grad.mean(1, keepdim=True))
        return x


class HookOfGradients(Plain):
    """A module's hook that reads the whole gradient."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.mlp.down.register_full_backward_hook(
                lambda module, grads, outs: (grads[0] - grads[0].mean(-1, keepdim=True),)
            )


class GradientInForward(Plain):
    """An energy's gradient is part of the forward."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            energy = layer.mlp(x).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            x = layer(x) - force / 9
        return x


# ---------------------------------------------------------------------------------------------------- odd ways to compute


class InPlaceResidual(Plain):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x += self.self_attn(self.norm1(x.clone()))
            x += self.mlp(self.norm2(x.clone()))
            return x


class WritesInto(Plain):
    class block(Block):
        class mlp_type(Mlp):
            def between(self, hidden: Tensor) -> Tensor:
                hidden = F.gelu(hidden)
                hidden[..., :7] = 0
                hidden[:, 0] *= 2
                return hidden


class Strided(Plain):
    class block(Block):
        class mlp_type(Mlp):
            def between(self, hidden: Tensor) -> Tensor:
                turned = F.gelu(hidden).mT.contiguous().mT
                return turned.as_strided(turned.shape, turned.stride()) + hidden[:, :, ::1].unfold(-1, 1, 1)[..., 0]


_BIAS = torch.arange(HIDDEN, dtype=torch.float64).sin()


class GlobalTensor(Plain):
    class block(Block):
        class mlp_type(Mlp):
            def between(self, hidden: Tensor) -> Tensor:
                return F.gelu(hidden) * _BIAS[-1] + _BIAS[: hidden.shape[-1]]


class Vmapped(Plain):
    class block(Block):
        class attention(Attention):
            def forward(self, x: Tensor) -> Tensor:
                q, k, v = self.heads(x)
                k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
                later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)

                def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                    return (q @ k.mT / HEAD_DIM**0.5).masked_fill(later, -1e9).softmax(-1) @ v

                out = torch.vmap(torch.vmap(one))(q, k, v)
                return self.o_proj(rearrange(out, "b h t d -> b t (h d)"))


class EinsumHeads(Plain):
    class block(Block):
        class attention(Attention):
            def forward(self, x: Tensor) -> Tensor:
                q, k, v = self.heads(x)
                k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
                scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / HEAD_DIM**0.5
                scores = scores + torch.full((x.shape[1], x.shape[1]), -1e9).triu(1)
                out = torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), v)
                return torch.einsum("bqhd,ohd->bqo", out, self.o_proj.weight.view(WIDTH, -1, HEAD_DIM))


class SlopesByCount(Plain):
    """Biases of distance whose slopes count the heads that are there."""

    class block(Block):
        class attention(Attention):
            def forward(self, x: Tensor) -> Tensor:
                q, k, v = self.heads(x)
                k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
                scores, place = q @ k.mT / HEAD_DIM**0.5, torch.arange(x.shape[1])
                slopes = 2.0 ** -torch.arange(q.shape[1]).to(x.dtype)
                scores = scores + slopes[:, None, None] * (place - place[:, None])
                out = scores.masked_fill(place > place[:, None], -1e9).softmax(-1) @ v
                return self.o_proj(rearrange(out, "b h t d -> b t (h d)"))


class ComplexRotary(Plain):
    class block(Block):
        class attention(Attention):
            def heads(self, x: Tensor) -> list[Tensor]:
                q, k, v = super().heads(x)
                angles = torch.arange(x.shape[1])[:, None] / 10.0 ** torch.arange(HEAD_DIM // 2)
                turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)

                def turned(each: Tensor) -> Tensor:
                    pairs = torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous())
                    return torch.view_as_real(pairs * turn).flatten(-2)

                return [turned(q), turned(k), v]


class Parametrized(Plain):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            parametrizations.weight_norm(layer.mlp.up)


class ChunkedHead(Plain):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.norm(self.body(self.embed_tokens(input_ids)))
        return torch.cat([F.linear(x, rows) for rows in self.lm_head.weight.split(23)], -1)


class ItemScale(Plain):
    class block(Block):
        class mlp_type(Mlp):
            def between(self, hidden: Tensor) -> Tensor:
                return F.gelu(hidden) / hidden.detach().abs().max().item()


class Nested(Plain):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            nested = torch.nested.as_nested_tensor(list(x.unbind(0)), layout=torch.jagged)
            return super().forward(torch.nested.to_padded_tensor(nested, 0.0))


class HalfTheWidth(Plain):
    """Each block is given a half of the features, by turns."""

    def body(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            half = x.roll(WIDTH // 2 * index, -1).clone()
            half[..., WIDTH // 2 :] = 0
            x = x + layer(half)
        return x


class ReentrantCheckpoint(Plain):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class SharedAttention(Plain):
    """One attention for all blocks, and two roles of one weight."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer.self_attn = self.layers[0].self_attn
        for layer in self.layers:
            layer.self_attn.k_proj.weight = layer.self_attn.v_proj.weight


class SharedState(Plain):
    """Blocks write into a dict that later ones read."""

    class block(Block):
        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
            seen.append(self.self_attn(self.norm1(x)))
            x = x + seen[-1] + seen[0] / 3
            return x + self.mlp(self.norm2(x))

    def body(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, seen)
        return x


class OutputDict(Plain):
    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.norm(self.body(self.embed_tokens(input_ids)))
        return {"scores": self.lm_head(hidden), "size": hidden.square().mean(-1)}

    @staticmethod
    def loss(model: Any, batch: Batch) -> Tensor:
        out, valid = model(batch["input_ids"]), batch["labels"] != -100
        logits = out["scores"].flatten(0, 1)
        summed = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum", ignore_index=-100)
        return summed + 0.1 * (out["size"] * valid).sum()


class LossInside(Plain):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(input_ids)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)

    @staticmethod
    def loss(model: Any, batch: Batch) -> Tensor:
        return model(batch["input_ids"], labels=batch["labels"])


class ByNumber(Plain):
    """Blocks in a ModuleDict, and blocks inside blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"b{index}": nn.Sequential(Block(), Block()) for index in range(LAYERS // 2)})

    def body(self, x: Tensor) -> Tensor:
        for index in range(LAYERS // 2):
            x = self.layers[f"b{index}"](x)
        return x


class Scripted(Plain):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and in many models
            self.gate = torch.jit.script(_gated)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + self.gate(x)
        return x


def _gated(hidden: Tensor) -> Tensor:
    return hidden * torch.sigmoid(1.7 * hidden) / hidden.abs().sum(-1, keepdim=True)
