"""Routers neither count padding nor learn from it: what fills ranks up, and rows that stand in for an empty microbatch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

import meshkit as mk
from meshkit.models.experts import MoE
from meshkit.moe.aux_loss import collect
from meshkit.moe.real_tokens import no_real_tokens, only_first, real_tokens
from tests.laws.parity.cases import Cell, Moe, batches, build, mesh_for, plan_of
from tests.laws.parity.test_compile import run_compiled_cell
from tests.laws.parity.test_parity import TOL_FP64, check
from tests.world import RankError, pool

ALL = Moe(z=0.1, balance=0.5, per="batch", bias=True)
LATER = Moe(z=0.1, balance=0.5, per="global")


@pytest.mark.parametrize(
    ("world", "cell"),
    [
        (4, Cell(mesh="cp=4", tokens=3, moe=ALL)),  # a rank has padding alone
        (4, Cell(mesh="cp=4 ep=2", tokens=5, moe=LATER, recompute="full")),
        (4, Cell(mesh="cp=2 tp=2", tokens=13, moe=ALL, sequence=True)),
        (4, Cell(mesh="cp=2 tp=2", tokens=13, moe=LATER, sequence=True, recompute="selective", microbatches=2)),
        (4, Cell(mesh="cp=2 tp=2", tokens=13, moe=ALL, documents=True)),
        (4, Cell(mesh="cp=2 tp=2 ep=2", tokens=13, moe=ALL, sequence=True, documents=True)),
        (4, Cell(mesh="pp=2 cp=2", tokens=3, moe=LATER, layers=3, microbatches=2)),
        (2, Cell(mesh="dp_shard=2", moe=LATER, microbatches=3)),  # a microbatch of one rank is empty
    ],
    ids=lambda each: each.mesh if isinstance(each, Cell) else None,
)
def test_a_model_with_padding_equals_one_device(world: int, cell: Cell) -> None:
    check(world, cell)


def test_compiled_blocks_with_padding_equal_one_device() -> None:
    # A rank has padding alone, which blocks that run again in backward must know too.
    cell = Cell(mesh="cp=2", tokens=1, moe=ALL, compile="aot_eager", recompute="full")
    for outcome in pool(2).run(run_compiled_cell, cell, timeout_s=240):
        assert max(outcome.loss, outcome.norm, outcome.gradient, outcome.parameter) <= TOL_FP64, outcome


def stand_in_gradients(mesh: str) -> tuple[float, list[Tensor]]:
    """Five rows on two ranks in three microbatches: the second rank has two rows and an empty microbatch."""
    cell = Cell(mesh=mesh, moe=Moe(balance=0.5, per="batch"), layers=3)
    run = mk.parallelize(build(cell), mesh_for(mesh), plan=plan_of(cell))
    batch = batches(cell)[0]
    rows = {name: tensor.tensor_split(run.mesh.data_ranks)[run.mesh.data_rank] for name, tensor in batch.items()}
    loss = run.forward_backward(rows, microbatches=3)
    return loss.item(), [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in run.parameters()]


def one_device_gradients() -> tuple[float, list[Tensor]]:
    """The same microbatches, rows 0 and 3, 1 and 4, and 2."""
    cell = Cell(mesh="dp_shard=1", moe=Moe(balance=0.5, per="batch"), layers=3)
    model, batch = build(cell), batches(cell)[0]
    tokens, total = (batch["labels"] != -100).sum(), 0.0
    for rows in ([0, 3], [1, 4], [2]):
        part = {name: tensor[rows] for name, tensor in batch.items()}
        with collect() as found:
            loss = F.cross_entropy(model(part["input_ids"]).flatten(0, 1), part["labels"].flatten(), reduction="sum")
        ((loss + found.total()) / tokens).backward()
        total += loss.item() / int(tokens)
    return total, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_replicate=2"])
def test_a_row_that_stands_in_changes_no_counts_of_others(mesh: str) -> None:
    expected_loss, expected = one_device_gradients()
    for loss, found in pool(2).run(stand_in_gradients, mesh):
        assert abs(loss - expected_loss) <= TOL_FP64
        assert len(found) == len(expected)
        assert max(float((mine - other).abs().max()) for mine, other in zip(found, expected, strict=True)) <= TOL_FP64


def test_which_tokens_are_real() -> None:
    device = torch.device("cpu")
    assert real_tokens(3, device) is None
    with only_first(5, 8):
        assert real_tokens(8, device).tolist() == [True] * 5 + [False] * 3
        assert real_tokens(4, device, part=1, parts=2).tolist() == [True, False, False, False]
    with only_first(0, 8):
        assert real_tokens(16, device).tolist() == [False] * 16
    with only_first(8, 8):
        assert real_tokens(16, device) is None
    with no_real_tokens(), only_first(5, 8):  # of a row that stands in, the split is no news
        assert real_tokens(8, device).tolist() == [False] * 8


class Own(MoE):
    """What its own code does with the tokens before they are routed."""

    order = ""

    def forward(self, x_BTC: Tensor) -> Tensor:
        if self.order == "mean":  # every rank of cp has the same
            weight = self.gate(x_BTC.mean(1, keepdim=True)).weights_NK.sum()
            return super().forward(x_BTC) * weight
        x = x_BTC.flip(1) if self.order == "flip" else x_BTC
        out: Tensor = super().forward(x)
        return out.flip(1) if self.order == "flip" else out


def own_routing(order: str, mesh: str, tokens: int, sequence: bool) -> tuple[float, list[Tensor]]:
    cell = Cell(mesh=mesh, tokens=tokens, moe=Moe(z=0.1, balance=0.5, per="batch"))
    model = build(cell)
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.__class__ = Own
            layer.mlp.order = order
    batch = batches(cell)[0]
    if not mesh:
        count = (batch["labels"] != -100).sum()
        with collect() as found:
            loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        ((loss + found.total()) / count).backward()
        return loss.item() / int(count), [p.grad for p in model.parameters()]
    run = mk.parallelize(model, mesh_for(mesh), plan=plan_of(cell), sequence=sequence)
    loss = run.forward_backward(batch)
    return loss.item(), [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in run.parameters()]


@pytest.mark.parametrize(
    ("order", "mesh", "tokens", "sequence", "said"),
    [
        ("", "cp=2", 16, False, ""),
        ("flip", "cp=2", 16, False, ""),
        ("", "cp=2", 3, False, ""),  # a rank with fewer tokens has no padding
        ("flip", "cp=2 tp=2", 13, True, "counts what your own code hands it"),
        ("", "cp=2 tp=2", 13, True, "counts what your own code hands it"),
        ("mean", "cp=2", 16, False, "it needs all of a dim, of which this rank has a part"),
    ],
)
def test_own_code_around_a_router_is_right_or_refused(
    order: str, mesh: str, tokens: int, sequence: bool, said: str
) -> None:
    ranks = pool(mk.mesh.MeshSpec.parse(mesh).world_size)
    if said:
        with pytest.raises(RankError, match=said):
            ranks.run(own_routing, order, mesh, tokens, sequence)
        return
    expected_loss, expected = own_routing(order, "", tokens, False)
    for loss, found in ranks.run(own_routing, order, mesh, tokens, sequence):
        assert abs(loss - expected_loss) <= TOL_FP64
        assert max(float((mine - other).abs().max()) for mine, other in zip(found, expected, strict=True)) <= TOL_FP64
