"""Ordinary modules with something odd about their parameters or buffers. Rows of features go in."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

WIDTH, HIDDEN, OUT, ROWS = 12, 20, 5, 8
Batch = dict[str, Tensor]


def features(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(200 + seed)
    return {"x": torch.randn(ROWS, WIDTH, generator=generator), "y": torch.randn(ROWS, OUT, generator=generator)}


def squares(model: Any, batch: Batch) -> Tensor:
    """Summed over rows."""
    return (model(batch["x"]) - batch["y"]).square().sum()


def row_count(batch: Batch) -> Tensor:
    return torch.tensor(batch["y"].shape[0])


class Layers(nn.Module):
    """Two blocks between a linear layer in and one out."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.relu(self.fc1(self.norm(x))))


# ----------------------------------------------------------------------------------------------------------------- buffers


class BatchNorm(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(x)


class RunningMean(Layers):
    """An exponential mean of what was seen, which the forward subtracts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


class Counter(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def middle(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Constant(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(WIDTH) / 5, persistent=False)

    def middle(self, x: Tensor) -> Tensor:
        return x * self.scale


# -------------------------------------------------------------------------------------------------------------- parameters


class MadeInForward(Layers):
    def middle(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(WIDTH))
        return x * self.late


class Lazy(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.late = nn.LazyLinear(WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        return x + self.late(x)


class ParameterHook(Layers):
    def __init__(self) -> None:
        super().__init__()
        for param in self.blocks.parameters():
            param.register_hook(lambda grad: grad * 2)


class AccumulateHook(Layers):
    def __init__(self) -> None:
        super().__init__()

        def halve(param: Tensor) -> None:
            param.grad.mul_(0.5)

        self.enter.weight.register_post_accumulate_grad_hook(halve)


class Scalar(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def middle(self, x: Tensor) -> Tensor:
        return x * self.scale


class Complex(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex128))

    def middle(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)


class NonContiguous(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.enter.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).T)
        self.slice = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])

    def middle(self, x: Tensor) -> Tensor:
        return x @ self.slice


class Empty(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        return x + self.none.sum()


class Integer(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def middle(self, x: Tensor) -> Tensor:
        return x[:, self.order]


class Frozen(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.enter.bias.requires_grad_(False)


class Listed(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.ones(1, WIDTH)])
        self.named = nn.ParameterDict({"shift": torch.ones(WIDTH)})

    def middle(self, x: Tensor) -> Tensor:
        return x * self.scales[0] * self.scales[1] + self.named["shift"]


class WeightNorm(Layers):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            parametrizations.weight_norm(block.fc1)


class SpectralNorm(Layers):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.blocks[0].fc2)


class Symmetric(Layers):
    class Rule(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).T

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.enter, "weight", self.Rule())


class Standardised(Layers):
    """The weight of a linear layer is normalised at every call, as weight standardisation does."""

    class Rows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight / self.weight.norm(dim=0), self.bias)

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.fc1 = self.Rows(WIDTH, HIDDEN)
