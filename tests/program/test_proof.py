"""Proof of plans: small modules whose plans are right, and others that would train something else, each with its place."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshkit.parallel.tensor.layout import tensor_layout
from meshkit.parallel.tensor.proof import prove_layout
from meshkit.plan import column, enter, per_head, replicate, row, sequence, vocab
from meshkit.plan import split as split_tokens
from meshkit.program import Example, Unproved, read_program

WIDTH, HIDDEN, VOCABULARY = 6, 12, 10
PAIR = {"embed": vocab(), "up": column(), "down": row(), "norm": sequence(), "head": vocab()}


class Pair(nn.Module):
    """An embedding, a norm, two linear layers with a function between them, and a head."""

    def __init__(
        self, between: Callable[..., Tensor] = F.gelu, after: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.between, self.after = between, after

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = self.after(x + self.down(self.between(self.up(self.norm(x)))))
        return self.head(x)


def prove(model: nn.Module, plan: dict[str, object], *, size: int = 2, split: bool = False, rows: int = 2) -> None:
    layout = tensor_layout(model, plan, size=size, sequence=split)  # type: ignore[arg-type]
    ids = torch.zeros(rows, 4 * size, dtype=torch.int64)
    prove_layout(read_program(model), layout, Example((ids,)))


@pytest.mark.parametrize("rows", (1, 2))  # a rank's tokens of one row are one piece of memory
@pytest.mark.parametrize("split", (False, True))
@pytest.mark.parametrize("size", (2, 3, 4, 8))  # of 12 features the last two of 8 ranks have none
def test_a_pair_is_proved(size: int, split: bool, rows: int) -> None:
    prove(Pair(), PAIR, size=size, split=split, rows=rows)


def test_one_row_is_split_into_other_tokens_on_each_rank() -> None:
    body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(VOCABULARY, WIDTH), body
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.body(self.embed(input_ids)))

    plan = {"embed": vocab(), "body": split_tokens(), "body.0": sequence(), "body.1": column(), "body.3": row()}
    plan["head"] = vocab()
    prove(Model(), plan, split=True, rows=1)


ELEMENTWISE = {
    "silu": F.silu,
    "a constant": lambda x: 3 * x,
    "a square": lambda x: x * x,
    "cut values": lambda x: x.clamp(-1, 1),
    "dropout of rate 0": lambda x: F.dropout(x, 0.0),
    "written in place": lambda x: x.mul_(2).add_(1),
    "turned twice": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "pairs of features": lambda x: x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
    "a mask of tokens": lambda x: x * torch.tril(torch.ones(x.shape[1], x.shape[1]))[-1][:, None],
}
MIXING = {
    "softmax": lambda x: x.softmax(-1),
    "a norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "a scale by the width": lambda x: x / math.sqrt(x.shape[-1]),
    "sorting": lambda x: x.sort(-1).values,
    "a running sum": lambda x: x.cumsum(-1),
    "features in reverse": lambda x: x.flip(-1),
    "features rolled": lambda x: x.roll(1, -1),
    "the largest": lambda x: x / x.amax(-1, keepdim=True),
    "dropout": lambda x: F.dropout(x, 0.1),
    "positions of features": lambda x: x * torch.arange(x.shape[-1]),
    "random numbers": lambda x: x + torch.rand(x.shape),
    # Complex constants whose real and imaginary parts have the same sums.
    "a turn by the place": lambda x: (
        (x * torch.polar(torch.ones(x.shape[-1]), torch.arange(x.shape[-1]) * math.pi / 2)).real
    ),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_treats_every_feature_alike_is_proved(name: str) -> None:
    prove(Pair(ELEMENTWISE[name]), PAIR)


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_features_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(Unproved, match=r"test_proof\.py:\d+|the output"):
        prove(Pair(MIXING[name]), PAIR)


TOKENS = {
    "a token's neighbour": lambda x: x + x.roll(1, 1),
    "a mean over tokens": lambda x: x - x.mean(1, keepdim=True),
    "a running sum over tokens": lambda x: x.cumsum(1),
    "positions": lambda x: x + torch.arange(x.shape[1])[:, None],
    "a convolution": lambda x: F.conv1d(x.transpose(1, 2), torch.ones(WIDTH, 1, 3), padding=1, groups=WIDTH).transpose(
        1, 2
    ),
}


@pytest.mark.parametrize("name", TOKENS)
def test_what_mixes_tokens_is_proved_on_tp_alone(name: str) -> None:
    prove(Pair(after=TOKENS[name]), PAIR)
    with pytest.raises(Unproved):
        prove(Pair(after=TOKENS[name]), PAIR, split=True)


def test_a_parameter_whose_gradient_would_be_a_ranks_own() -> None:
    class Scaled(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.LayerNorm(1)

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            return self.head(x + self.down(self.scale(self.up(self.norm(x)).unsqueeze(-1)).squeeze(-1)))

    prove(Scaled(), {**PAIR, "scale": per_head()})
    with pytest.raises(Unproved, match="its gradient would not be summed over ranks"):
        prove(Scaled(), {**PAIR, "scale": replicate()})


def test_a_region_that_is_entered_twice_sums_its_gradient_twice() -> None:
    class Within(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.pair(input_ids)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, HIDDEN), "down": nn.Linear(HIDDEN, WIDTH)})
            self.outer = Inner(self.mlp)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.outer(self.embed(input_ids))

    class Inner(nn.Module):
        def __init__(self, mlp: nn.ModuleDict) -> None:
            super().__init__()
            self.inner = Innermost(mlp)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    class Innermost(nn.Module):
        def __init__(self, mlp: nn.ModuleDict) -> None:
            super().__init__()
            self.up, self.down = mlp["up"], mlp["down"]

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.relu(self.up(x)))

    plan = {
        "embed": vocab(),
        "outer": enter(),
        "outer.inner": enter(),
        "outer.inner.up": column(),
        "outer.inner.down": row(),
    }
    model = Twice()
    del model.mlp
    with pytest.raises(Unproved, match="it takes a tensor that is invariant on the axis, but this one is replicated"):
        prove(model, plan)


def test_an_output_that_is_only_a_part() -> None:
    class Headless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, HIDDEN)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.up(self.embed(input_ids))

    with pytest.raises(Unproved, match="the output .* is only this rank's part"):
        prove(Headless(), {"embed": vocab(), "up": column()})


def test_an_embedding_with_a_scale_keeps_it() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 7

    model = Pair()
    model.embed = Scaled(VOCABULARY, WIDTH)
    prove(model, PAIR)
