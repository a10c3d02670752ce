"""What a loss can read beside the output: tensors that modules keep, and those in objects of the output."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.mesh import MeshSpec
from meshkit.plan import column, enter, replicate, row, vocab
from meshkit.program import Unproved, read_program
from meshkit.resolve import resolve
from meshkit.strategy import Strategy
from tests.laws.parity.cases import mesh_for
from tests.parallel.tensor.parts import VOCABULARY, WIDTH, Model
from tests.world import pool

PLAN = mk.Plan(
    tensor={
        "embed_tokens": vocab(),
        "layers.*.norm": replicate(),
        "layers.*.part": enter(),
        "layers.*.part.up": column(),
        "layers.*.part.down": row(),
        "lm_head": vocab(),
    },
    blocks=("layers.*",),
)


class Keeps(nn.Module):
    """hidden: whether it keeps the hidden features, or what it returns."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.up, self.down, self.hidden = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.up(x))
        out = self.down(hidden)
        self.kept = hidden if self.hidden else out
        return out


@dataclass
class Output:
    logits: Tensor
    features: Tensor


class Returns(Model):
    """Returns an object with the features of the first layer."""

    def forward(self, input_ids: Tensor) -> Output:  # type: ignore[override]
        logits = super().forward(input_ids)
        return Output(logits, self.get_submodule("layers.0.part").kept)  # type: ignore[arg-type]


def build(hidden: bool, kind: type[Model] = Model) -> nn.Module:
    torch.manual_seed(0)
    return kind(lambda: Keeps(hidden), lambda: Keeps(hidden)).double()


@pytest.mark.parametrize("kind", [Model, Returns])
def test_parts_that_a_module_keeps_are_refused(kind: type[Model]) -> None:
    with pytest.raises(Unproved, match="kept"):
        resolve(read_program(build(True, kind)), Strategy(plan=PLAN), MeshSpec(tp=2))


def test_what_is_whole_may_be_kept() -> None:
    resolve(read_program(build(False)), Strategy(plan=PLAN), MeshSpec(tp=2))


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["input_ids"])
    kept = out.features if isinstance(out, Output) else model.get_submodule("layers.1.part").kept
    return getattr(out, "logits", out).square().mean() + kept.pow(4).mean()  # type: ignore[operator]


def on_ranks(hidden: bool, kind: type[Model]) -> list[float]:
    """[largest difference of a gradient, difference of the loss]"""
    alone, run = build(hidden, kind), mk.parallelize(build(hidden, kind), mesh_for("tp=2"))
    batch = {"input_ids": torch.arange(24).view(2, 12) % VOCABULARY}
    loss = run.forward_backward(batch, microbatches=1, loss=loss_of, count=lambda _: torch.tensor(1))
    expected = loss_of(alone, batch)
    expected.backward()
    wanted = dict(alone.named_parameters())
    differences = [
        (mk.core.sharding.full_tensor(param.grad) - wanted[name].grad).abs().max().item()  # type: ignore[operator]
        for name, param in run.named_parameters()
    ]
    return [max(differences), abs(loss.item() - expected.item())]


@pytest.mark.parametrize("kind", [Model, Returns])
@pytest.mark.parametrize("hidden", [True, False])
def test_a_loss_of_what_is_kept_equals_one_device(hidden: bool, kind: type[Model]) -> None:
    for found in pool(2).run(on_ranks, hidden, kind):
        assert max(found) < 1e-12
