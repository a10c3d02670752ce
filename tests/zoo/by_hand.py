"""Hand-written decoders that multiply queries and keys themselves, with masks made in many ways, right and odd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn

from tests.zoo.decoders import HEAD_DIM, LONGEST, Attention, Block, Plain

LOW = -1e9


class Products(Attention):
    """weigh: scores [b h t s] and the number of tokens to probabilities; a method, so that each has its own lines."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril())
        self.register_buffer("slopes", torch.linspace(0.1, 1, 4))
        self.masks: dict[int, Tensor] = {}

    def weigh(self, scores: Tensor, tokens: int) -> Tensor:
        return scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), LOW).softmax(-1)

    def keys(self, k: Tensor) -> Tensor:
        return k

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        scores = q @ self.keys(k).transpose(-1, -2) / HEAD_DIM**0.5
        out = torch.matmul(self.weigh(scores, x.shape[1]), v)
        return self.o_proj(rearrange(out, "b h t d -> b t (h d)"))


def decoder(name: str, **methods: Callable[..., Tensor]) -> type[Plain]:
    """A decoder whose attention has these methods in place of the right ones."""
    attention = type(f"{name}Attention", (Products,), methods)
    return type(name, (Plain,), {"block": type(f"{name}Block", (Block,), {"attention": attention})})


def _added(self: Products, scores: Tensor, tokens: int) -> Tensor:
    return (scores + torch.full((tokens, tokens), float("-inf"), dtype=scores.dtype).triu(1)).softmax(-1)


def _kept(self: Products, scores: Tensor, tokens: int) -> Tensor:
    return torch.where(self.seen[:tokens, :tokens], scores, LOW).softmax(-1)


def _window(self: Products, scores: Tensor, tokens: int) -> Tensor:
    ones = torch.ones(tokens, tokens, dtype=torch.bool)
    near = ones.triu(-3)
    return scores.masked_fill(~(ones.tril() & near), LOW).softmax(-1)


def _two_triangles(self: Products, scores: Tensor, tokens: int) -> Tensor:
    return scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(-3), LOW).softmax(-1)


def _half(self: Products, scores: Tensor, tokens: int) -> Tensor:
    return scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(tokens // 2), LOW).softmax(-1)


def _value_is_tokens(self: Products, scores: Tensor, tokens: int) -> Tensor:
    return (scores - torch.full((tokens, tokens), tokens, dtype=scores.dtype).triu(1)).softmax(-1)


def _written_later(self: Products, scores: Tensor, tokens: int) -> Tensor:
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    mask[0, -1] = True
    return scores.masked_fill(~mask, LOW).softmax(-1)


def _second_cut(self: Products, scores: Tensor, tokens: int) -> Tensor:
    return torch.where(self.seen[1 : tokens + 1, 1 : tokens + 1], scores, LOW).softmax(-1)


def _other_rows(self: Products, scores: Tensor, tokens: int) -> Tensor:
    return torch.where(self.seen[2 : tokens + 2, :tokens], scores, LOW).softmax(-1)


def _of_columns(self: Products, scores: Tensor, tokens: int) -> Tensor:
    return torch.where(self.seen[:tokens, :tokens], scores, LOW).softmax(-2)


def _of_all_scores(self: Products, scores: Tensor, tokens: int) -> Tensor:
    scores = torch.where(self.seen[:tokens, :tokens], scores, -30)
    weights = (scores - scores.amax((-1, -2), keepdim=True)).exp()
    return weights / weights.sum((-1, -2), keepdim=True)


def _exp_by_hand(self: Products, scores: Tensor, tokens: int) -> Tensor:
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * self.seen[:tokens, :tokens]
    return weights / weights.sum(-1, keepdim=True)


def _kept_masks(self: Products, scores: Tensor, tokens: int) -> Tensor:
    if tokens not in self.masks:
        self.masks[tokens] = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return scores.masked_fill(~self.masks[tokens], LOW).softmax(-1)


def _distances(self: Products, scores: Tensor, tokens: int) -> Tensor:
    at = torch.arange(tokens)
    bias = (at[None, :] - at[:, None]).to(scores.dtype) * self.slopes[:, None, None]
    return (scores + bias).masked_fill(~self.seen[:tokens, :tokens], LOW).softmax(-1)


def _counted_mask(self: Products, scores: Tensor, tokens: int) -> Tensor:
    at = torch.arange(tokens)
    return scores.masked_fill(at[None, :] > at[:, None], LOW).softmax(-1)


def _best(self: Products, scores: Tensor, tokens: int) -> Tensor:
    scores = torch.where(self.seen[:tokens, :tokens], scores, LOW)
    least = scores.topk(4, -1).values[..., -1:]
    return scores.masked_fill(scores < least, LOW).softmax(-1)


def _centred_scores(self: Products, scores: Tensor, tokens: int) -> Tensor:
    return torch.where(self.seen[:tokens, :tokens], scores - scores.mean(), LOW).softmax(-1)


def _diagonal(self: Products, scores: Tensor, tokens: int) -> Tensor:
    own = torch.diagonal(scores, dim1=-2, dim2=-1)[..., None]
    return torch.where(self.seen[:tokens, :tokens], scores - own, LOW).softmax(-1)


def _transposed(self: Products, scores: Tensor, tokens: int) -> Tensor:
    return torch.where(self.seen[:tokens, :tokens], scores + scores.mT, LOW).softmax(-1)


def _shifted(self: Products, k: Tensor) -> Tensor:
    return k.roll(1, 2)


def _by_position(self: Products, k: Tensor) -> Tensor:
    return k * torch.arange(k.shape[2], dtype=k.dtype)[:, None].cos()


ByProducts = decoder("ByProducts")
ByProductsAdded = decoder("ByProductsAdded", weigh=_added)
ByProductsKept = decoder("ByProductsKept", weigh=_kept)
ByProductsWindow = decoder("ByProductsWindow", weigh=_window)
ByProductsTwoTriangles = decoder("ByProductsTwoTriangles", weigh=_two_triangles)
ByProductsHalf = decoder("ByProductsHalf", weigh=_half)
ByProductsValueIsTokens = decoder("ByProductsValueIsTokens", weigh=_value_is_tokens)
ByProductsWrittenLater = decoder("ByProductsWrittenLater", weigh=_written_later)
ByProductsSecondCut = decoder("ByProductsSecondCut", weigh=_second_cut)
ByProductsOtherRows = decoder("ByProductsOtherRows", weigh=_other_rows)
ByProductsOfColumns = decoder("ByProductsOfColumns", weigh=_of_columns)
ByProductsOfAllScores = decoder("ByProductsOfAllScores", weigh=_of_all_scores)
ByProductsExp = decoder("ByProductsExp", weigh=_exp_by_hand)
ByProductsKeptMasks = decoder("ByProductsKeptMasks", weigh=_kept_masks)
ByProductsDistances = decoder("ByProductsDistances", weigh=_distances)
ByProductsCountedMask = decoder("ByProductsCountedMask", weigh=_counted_mask)
ByProductsBest = decoder("ByProductsBest", weigh=_best)
ByProductsCentredScores = decoder("ByProductsCentredScores", weigh=_centred_scores)
ByProductsDiagonal = decoder("ByProductsDiagonal", weigh=_diagonal)
ByProductsTransposed = decoder("ByProductsTransposed", weigh=_transposed)
ByProductsShifted = decoder("ByProductsShifted", keys=_shifted)
ByProductsByPosition = decoder("ByProductsByPosition", keys=_by_position)


class ByProductsOfHalves(Plain):
    """One layer by products, and the next by a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = ByProducts.block()


class LinearAttention(Attention):
    """Keys times values first, over all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        out = q.softmax(-1) @ (k.softmax(-1).transpose(-1, -2) @ v)
        return self.o_proj(rearrange(out, "b h t d -> b t (h d)"))


class ByProductsLinear(Plain):
    block = type("LinearBlock", (Block,), {"attention": LinearAttention})


class MixedByWeight(nn.Module):
    """A weight of tokens by tokens, as MLP-Mixer has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LONGEST, LONGEST) / LONGEST)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        return torch.matmul(self.weight[:tokens, :tokens].expand(x.shape[0], -1, -1), x)


class ByProductsMixer(Plain):
    block = type("MixerBlock", (Block,), {"attention": MixedByWeight})
