"""Random models, forwards broken off or in flight together, backwards in any order: the gradients without offload."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.memory.offload import offload_of
from tests.depth import thin
from tests.memory.late_streams import LateStreams

WIDTH = 6


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        out = x * other
        ctx.save_for_backward(out, x.t() if x.ndim == 2 else x, other, x[:1])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        out, x, other, first = ctx.saved_tensors
        x = x.t() if x.ndim == 2 else x
        return grad * other + out * 0.1 * first.sum(), grad * x


class Steps(nn.Module):
    """A few random steps on [rows, WIDTH] values, some of which go on to the next blocks."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.steps = [draw.choice(sorted(STEPS)) for _ in range(draw.randrange(1, 7))]
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.fails = False

    def forward(self, x: Tensor, shared: list[Tensor], *, table: Tensor) -> tuple[Tensor, list[Tensor]]:
        for step in self.steps:
            x = STEPS[step](self, x, shared, table)
            if self.fails:
                raise ValueError("broken off")
        return x, [*shared, x[:, ::2].repeat(1, 2)][-3:]


STEPS: dict[str, Any] = {
    "linear": lambda m, x, s, t: m.linear(x),
    "norm": lambda m, x, s, t: m.norm(x),
    "relu_": lambda m, x, s, t: (x * 1.5).relu_(),
    "tanh_ of a view": lambda m, x, s, t: _in_place_on_a_view(x),
    "dropout": lambda m, x, s, t: F.dropout(x, 0.4),
    "attend": lambda m, x, s, t: (x @ x.t()).softmax(-1) @ x,
    "transpose": lambda m, x, s, t: (x.t().sin().t() * x).contiguous(),
    "chunks": lambda m, x, s, t: torch.cat([part * part.flip(0) for part in m.linear(x).chunk(2, -1)], -1),
    "expand": lambda m, x, s, t: x * x.mean(0, keepdim=True).expand_as(x),
    "shared": lambda m, x, s, t: x + (s[0] * s[-1]).sigmoid(),
    "table": lambda m, x, s, t: x * t[: x.shape[0]],
    "keeps": lambda m, x, s, t: Keeps.apply(x, x.sigmoid()),
    "select": lambda m, x, s, t: x[torch.arange(x.shape[0]).flip(0)] * x[0],
    "max": lambda m, x, s, t: x - x.max(-1, keepdim=True).values + x.sort(-1).values.cos(),
    "stay": lambda m, x, s, t: x,
    "square": lambda m, x, s, t: x.as_strided(x.shape, x.stride()).square().clamp(max=2),
}


def _in_place_on_a_view(x: Tensor) -> Tensor:
    out = x.clone()
    out[:, 1:3].tanh_()
    return out


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        self.blocks = nn.ModuleList(Steps(draw) for _ in range(4))
        self.order = [draw.randrange(4) for _ in range(draw.randrange(3, 7))]  # some twice, some never
        self.modes = [draw.choice(["none", "full", "selective"]) for _ in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        shared, table = [x * 2], torch.linspace(0.5, 1, 64, dtype=x.dtype).unsqueeze(-1)
        for index in self.order:
            x, shared = self.blocks[index](x, shared, table=table)
        return (x.tanh() * shared[-1].tanh()).sum()


def play(seed: int, dtype: torch.dtype, policy: mk.strategy.ActivationOffload | None) -> tuple[list[Tensor], Any]:
    """Four rounds of three microbatches of uneven sizes; the same draws with and without offload."""
    model = Model(seed).to(dtype)
    for block, mode in zip(range(4), model.modes, strict=True):
        mk.recompute(model, blocks=[f"blocks.{block}"], mode=mode)
    if policy is not None:
        mk.offload_activations(model, blocks=[f"blocks.{index}" for index in range(4)], policy=policy)
    draw = random.Random(seed + 1)
    torch.manual_seed(seed)
    inputs = []
    for _ in range(4):
        losses = []
        for _ in range(3):
            x = torch.randn(draw.randrange(1, 40), WIDTH).to(dtype).requires_grad_()
            inputs.append(x)
            losses.append(model(x))
            if draw.random() < 0.2:
                model(x.detach())  # no backward
            if draw.random() < 0.2:
                failing = model.blocks[draw.choice(model.order)]
                failing.fails = True
                with pytest.raises(ValueError, match="broken off"):
                    model(x)
                failing.fails = False
        draw.shuffle(losses)
        for loss in losses:
            if draw.random() < 0.2 and "selective" not in model.modes:
                loss.backward(retain_graph=True)
            if draw.random() < 0.9:
                loss.backward()
    grads = [value.grad for value in (*inputs, *model.parameters()) if value.grad is not None]
    return grads, offload_of(model)


@pytest.mark.parametrize("seed", thin(range(18), 2))
def test_random_models(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16])
    policy = mk.strategy.ActivationOffload(
        to="disk" if seed % 3 == 2 else "host",
        min_bytes=draw.choice([1, 1, 200]),
        keep_last=draw.choice([0, 0, 1]),
        ahead=draw.randrange(3),
        **({"staging": draw.choice([1, 1 << 20])} if seed % 3 == 2 else {}),
    )
    if seed % 3:
        monkeypatch.setattr("meshkit.memory.offload._apply.streams_of", lambda device: LateStreams())
    expected, _ = play(seed, dtype, None)
    found, offload = play(seed, dtype, policy)
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)
    gc.collect()
    offload.end_step()
    assert not offload._saved and not offload._leaving and offload.last_step.stored_bytes > 0
