"""Hand-written decoders with losses as research has them: several heads, parts that are detached, targets of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.step import Batch
from tests.zoo.decoders import LAYERS, WIDTH, Block, Plain


def _valid(batch: Batch) -> Tensor:
    return batch["labels"] != -100


class Headed(Plain):
    """Returns the logits and something of each token, whose square is a part of the loss."""

    def of_tokens(self, hidden: Tensor, first: Tensor) -> Tensor:
        return hidden.mean(-1)

    def forward(self, input_ids: Tensor) -> Any:
        first = self.embed_tokens(input_ids)
        hidden = self.norm(self.body(first))
        return {"logits": self.lm_head(hidden), "of_tokens": self.of_tokens(hidden, first)}

    @staticmethod
    def loss(model: Any, batch: Batch) -> Tensor:
        given = model(batch["input_ids"])
        return mk.cross_entropy(given["logits"], batch["labels"]) + (given["of_tokens"] * _valid(batch)).square().sum()


class DetachedHead(Plain):
    """A linear probe: the head alone has gradients, and nothing is frozen."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(x).detach()


class TiedDetachedHead(DetachedHead):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = self.embed_tokens.weight


class UnusedSide(Headed):
    """What an early layer makes is returned, and no part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)

    def of_tokens(self, hidden: Tensor, first: Tensor) -> Tensor:
        return self.side(first)

    @staticmethod
    def loss(model: Any, batch: Batch) -> Tensor:
        return mk.cross_entropy(model(batch["input_ids"])["logits"], batch["labels"])


class ValueHead(Headed):
    """As a critic's, on detached features."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, 1)

    def of_tokens(self, hidden: Tensor, first: Tensor) -> Tensor:
        return self.value(hidden.detach()).squeeze(-1) - 1


class Teacher(Headed):
    """A frozen teacher inside of the module, towards which features go."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)

    def of_tokens(self, hidden: Tensor, first: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(first)
        return (hidden - wanted).square().mean(-1)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.5 * grad


class Adversary(ValueHead):
    """The body learns against a second head: its gradient is reversed."""

    def of_tokens(self, hidden: Tensor, first: Tensor) -> Tensor:
        return self.value(_Reversed.apply(hidden)).squeeze(-1) - 1


class Codebook(Headed):
    """Vector quantisation: the nearest code, passed through straight, with a commitment to it."""

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, WIDTH))

        def forward(self, x: Tensor) -> Any:
            nearest = torch.cdist(x, self.weight.expand(len(x), -1, -1)).argmin(-1)
            code = self.weight[nearest]
            return x + (code - x).detach(), (code.detach() - x).square().mean(-1) + (code - x.detach()).square().mean(
                -1
            )

    def __init__(self) -> None:
        super().__init__()
        self.codes = self.Codes()

    def forward(self, input_ids: Tensor) -> Any:
        code, commitment = self.codes(self.body(self.embed_tokens(input_ids)))
        return {"logits": self.lm_head(self.norm(code)), "of_tokens": commitment}


class Depths(Plain):
    """Mixture of depths: a router sends half of the tokens through the block."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            weights = self.router(x).squeeze(-1)
            places = weights.topk(x.shape[1] // 2, dim=1).indices.sort(-1).values
            chosen = x.gather(1, places[..., None].expand(-1, -1, WIDTH))
            added = (super().forward(chosen) - chosen) * torch.sigmoid(weights.gather(1, places))[..., None]
            return x.scatter_add(1, places[..., None].expand(-1, -1, WIDTH), added)


class BiasOfRow(Plain):
    """A small net makes the biases of all blocks from the mean of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper = nn.Linear(WIDTH, LAYERS * WIDTH)

    def body(self, x: Tensor) -> Tensor:
        bias = self.hyper(x.mean(1)).unflatten(-1, (LAYERS, WIDTH))
        for index, layer in enumerate(self.layers):
            x = layer(x + bias[:, index, None])
        return x


class WeightedMean(Plain):
    """A mean by weights of classes, times the count: another one for each part of the rows."""

    @staticmethod
    def loss(model: Any, batch: Batch) -> Tensor:
        logits = model(batch["input_ids"])
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        weights = torch.linspace(0.5, 2, logits.shape[-1]).to(logits)
        mean = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), weights, ignore_index=-100)
        return mean * _valid(batch).sum()
