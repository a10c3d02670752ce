"""What is unproved of a user's plan: refused, or left whole where it was asked for, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.mesh import MeshSpec
from meshkit.plan import column, enter, replicate, row, sequence, vocab
from meshkit.program import Unproved, read_program
from meshkit.resolve import resolve
from meshkit.strategy import Strategy
from tests.laws.parity.cases import mesh_for
from tests.parallel.tensor.parts import VOCABULARY, Gated, Model, Normed
from tests.world import pool

# The first layer is right on parts; the second has a norm over features that ranks have parts of.
PLAN = mk.Plan(
    tensor={
        "embed_tokens": vocab(),
        "layers.*.norm": sequence(),
        "layers.*.part": enter(),
        "layers.0.part.both": column(parts=(24, 24)),
        "layers.0.part.down": row(),
        "layers.1.part.up": column(),
        "layers.1.part.norm": replicate(),
        "layers.1.part.down": row(),
        "lm_head": vocab(),
    },
    blocks=("layers.*",),
)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model(Gated, Normed).double()


def plan(unproved: str) -> mk.Plan:
    strategy = Strategy(plan=PLAN, unproved=unproved)  # type: ignore[arg-type]
    return resolve(read_program(build()), strategy, MeshSpec(tp=2)).plan


def test_only_the_region_that_is_unproved_is_left_whole() -> None:
    with pytest.raises(Unproved, match=r"layers.1.part.norm at parts.py:\d+: .* normalized_shape"):
        plan("refuse")
    found = plan("replicate")
    assert found.tensor["layers.*.part.both"] == column(parts=(24, 24))
    assert {found.tensor[name] for name in ("layers.1.part", "layers.*.part.up")} == {replicate()}
    assert "layers.1.part is whole on every rank: on a rank of tp=2, layers.1.part.norm at" in str(found)


def test_a_plan_that_is_proved_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model = Model(Gated)
    tensor = {name: style for name, style in PLAN.tensor.items() if "layers.1" not in name}
    own = mk.Plan(tensor=tensor, blocks=PLAN.blocks)
    found = resolve(read_program(model), Strategy(plan=own, unproved="replicate"), MeshSpec(tp=2)).plan
    assert found == own and not found.notes


def gradients(sequence: bool) -> list[tuple[str, float]]:
    ids = torch.arange(16).view(2, 8) % VOCABULARY
    alone = build()
    loss_of(alone, {"input_ids": ids}).backward()
    run = mk.parallelize(build(), mesh_for("tp=2"), plan=PLAN, unproved="replicate", sequence=sequence)
    run.forward_backward({"input_ids": ids}, microbatches=1, loss=loss_of, count=lambda _: torch.tensor(1))
    full = {name: param.grad.full_tensor() for name, param in run.model.named_parameters()}  # type: ignore[union-attr]
    return [
        (name, (param.grad - full[name]).abs().max().item() if param.grad is not None else 0.0)
        for name, param in alone.named_parameters()
    ]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"])
    return mk.cross_entropy(logits, batch["input_ids"])


@pytest.mark.parametrize("sequence", [False, True])
def test_every_gradient_equals_one_device(sequence: bool) -> None:
    for found in pool(2).run(gradients, sequence):
        assert len(found) > 8
        assert all(difference < 1e-12 for _, difference in found), found
