"""Ordinary modules that are called oddly, and some that torch itself has. Rows of features go in, as in `odd`."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.odd import HIDDEN, OUT, WIDTH, Batch, Layers, Residual

# --------------------------------------------------------------------------------------------- who calls what, and whether


class UnusedAtTimes(Layers):
    """On some ranks a block has nothing to do."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave(self.blocks[0](x) if x[0, 0] > 0 else self.blocks[1](x))


class UnusedParameterAtTimes(Layers):
    """On some ranks a parameter of the model has no row."""

    def __init__(self) -> None:
        super().__init__()
        self.bend = nn.Linear(WIDTH, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0.8).nonzero()[:, 0]
        return x.index_copy(0, rows, self.bend(x[rows])) if len(rows) else x


class UnusedAtTimesInLoss(Layers):
    """On some ranks the loss does not read what a block made."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        first, second = self.blocks[0](x), self.blocks[1](x)
        return self.leave(first if x[0, 0] > 0 else second)


class UnusedLater(Layers):
    """As `UnusedAtTimes`, but in the first step all ranks run all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.enter(x)
        blocks = self.blocks if self.calls == 1 or x[0, 0] > 0 else self.blocks[:1]
        for block in blocks:
            x = block(x)
        return self.leave(x)


class UsesChildWeight(Layers):
    def middle(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.blocks[0].fc1.weight)), self.blocks[0].fc2.weight)


class OtherMethods(Layers):
    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.enter(x)))

    @staticmethod
    def loss(model: Any, batch: Batch) -> Tensor:
        return (model.leave(model.encode(batch["x"])) - batch["y"]).square().sum()


class CalledTwice(Layers):
    @staticmethod
    def loss(model: Any, batch: Batch) -> Tensor:
        return (model(batch["x"]) + model(-batch["x"]) - batch["y"]).square().sum()


class InClosure(Layers):
    """A child that no attribute names holds a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_away = {"part": Residual()}

    def middle(self, x: Tensor) -> Tensor:
        return self.hidden_away["part"](x)


class AskedByName(Layers):
    def __getattr__(self, name: str) -> Any:
        return 3.0 if name == "factor" else super().__getattr__(name)

    def middle(self, x: Tensor) -> Tensor:
        return x * self.factor


class TiedAutoencoder(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.enter(x)))
        return self.leave(x @ self.enter.weight)


class OwnFunction(Layers):
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clamp(-1, 1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad  # straight through

    def middle(self, x: Tensor) -> Tensor:
        return self.Clipped.apply(x)


class NoGradient(Layers):
    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.blocks[1](x)
        return x * gate.sigmoid()


# ---------------------------------------------------------------------------------------------------- torch's own modules


class TorchAttention(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        tokens = x[:, None] * torch.arange(1, 4)[:, None]
        return self.attend(tokens, tokens, tokens, need_weights=False)[0].mean(1)


class TorchEncoder(Layers):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def middle(self, x: Tensor) -> Tensor:
        return self.encoder(x[:, None] * torch.arange(1, 4)[:, None]).mean(1)


class TorchLstm(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None] * torch.arange(1, 4)[:, None])[0][:, -1]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            OrderedDict(conv=nn.Conv2d(1, 6, 3, padding=1), norm=nn.GroupNorm(2, 6), act=nn.ReLU(), flat=nn.Flatten())
        )
        self.leave = nn.Linear(6 * WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.net(x.view(-1, 1, 3, WIDTH // 3)))


class BilinearPair(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        return self.pair(x, x.tanh()) / 4


class Pairs(nn.Module):
    """Linear layers whose names sound like a feed-forward, and that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.leave = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.leave(up) + self.down(up).mean(-1, keepdim=True) + up.sum(-1, keepdim=True)
