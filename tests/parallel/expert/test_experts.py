"""Laws 1 to 3 with experts: every folding of the expert view into the dense one trains as one device does."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.moe import routing
from meshkit.parallel.expert import DispatchPlan, OneRank
from meshkit.parallel.expert._hot_experts import hot_experts_of
from meshkit.preflight.observe import observe
from meshkit.strategy import Capacity, ExpertPolicy
from tests.depth import covering, deal, deep, draws, thin
from tests.laws.parity.cases import Cell, Moe, batches, own_rows, start
from tests.laws.parity.test_parity import check
from tests.world import RankError, pool, run_ranks

FOLDINGS = [
    (ranks, f"{dense} {folded}")
    for ranks, dense, foldings in [
        (2, "dp_shard=2", ["", "ep=2", "etp=2"]),
        (2, "dp_replicate=2", [""]),
        (2, "cp=2", ["", "ep=2"]),
        (2, "tp=2", ["", "ep=2", "etp=2"]),
        (2, "pp=2", [""]),
        (4, "dp_shard=4", ["ep=2", "ep=4", "ep=2 etp=2"]),
        (4, "dp_shard=2 tp=2", ["", "ep=2", "ep=4", "etp=2", "ep=2 etp=2"]),
        (4, "dp_replicate=2 dp_shard=2", ["ep=2"]),
        (4, "dp_shard=2 cp=2", ["ep=2", "ep=4"]),
        (4, "cp=2 tp=2", ["ep=4", "ep=2 etp=2"]),
        (4, "tp=4", ["ep=2", "ep=4", "etp=4"]),
        (4, "pp=2 dp_shard=2", ["ep=2", "etp=2"]),
        (4, "pp=2 tp=2", ["", "ep=2"]),
        (8, "dp_shard=2 cp=2 tp=2", ["ep=8", "ep=4 etp=2"]),
        (8, "pp=2 dp_shard=2 tp=2", ["ep=4"]),
        (8, "dp_replicate=2 dp_shard=2 tp=2", ["ep=2 etp=2"]),
    ]
    for folded in foldings
]

ROUTERS = {
    "chosen": [1, 2, 3],
    "shared": [None, 24],
    "score": ["softmax", "softmax_of_chosen", "sigmoid"],
    "normalise": [False, True],
    "bias": [False, True],
    "z": [0.0, 0.01],
    "per": ["sequence", "batch", "global"],
    "balance": [0.0, 0.5],
    "even": [False, True],  # as many experts on each rank of ep
}
RUNS = {
    "microbatches": [1, 2, 3],
    "sequence": [False, True],
    "zero": [1, 2, 3],
    "recompute": ["none", "full", "selective"],
    "schedule": ["1f1b", "zb-h1"],
}
EXPERTS = {1: (5, 5), 2: (9, 8), 4: (11, 8), 8: (15, 8)}  # by ep: uneven and even


def cell_of(mesh: str, choice: dict) -> Cell:
    """What cannot be is replaced: sequences are whole on no rank of cp, rows of zeros count in a batch's loss, and without pp
    there is no schedule.
    """
    spec, router = MeshSpec.parse(mesh), {name: choice[name] for name in ROUTERS}
    router["experts"] = EXPERTS[spec.ep][router.pop("even")]
    if spec.cp > 1 and router["per"] == "sequence":
        router["per"] = "global"
    moe, run = Moe(**router), {name: choice[name] for name in RUNS}
    if moe.balance and moe.per == "batch":
        run["microbatches"] = 1
    if spec.pp == 1:
        run["schedule"] = "1f1b"
    return Cell(mesh=mesh, layers=3, moe=moe, **run)


@pytest.mark.parametrize(
    ("folding", "choice"),
    [pytest.param(*each, id=each[0][1]) for each in thin(deal(covering({**ROUTERS, **RUNS}), FOLDINGS), 8)],
)
def test_every_folding_equals_one_device(folding: tuple[int, str], choice: dict) -> None:
    ranks, mesh = folding
    check(ranks, cell_of(mesh, choice))


@deep
@pytest.mark.parametrize(("ranks", "mesh"), FOLDINGS)
@draws(2)
@given(choice=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in {**ROUTERS, **RUNS}.items()}))
def test_any_choices_equal_one_device(ranks: int, mesh: str, choice: dict) -> None:
    check(ranks, cell_of(mesh, choice))


@pytest.mark.parametrize("mesh", ["dp_shard=2", "pp=2"])
def test_microbatches_without_rows_count_neither_in_losses_nor_in_counts_of_experts(mesh: str) -> None:
    """Of 5 rows on 2 ranks in 4 microbatches, or on one in 6, some have none: a row of zeros runs in their place."""
    router = Moe(z=0.01, balance=0.5, bias=True)
    check(2, Cell(mesh=mesh, moe=router, microbatches=6 if "pp" in mesh else 4))


HOT = ExpertPolicy(copies=3, target=1.0)  # as many copies as there is use for


def hot_cells() -> list[tuple[int, Cell]]:
    return [
        (2, Cell(mesh="dp_shard=2 ep=2", copies=2, moe=Moe(experts=8))),
        (4, Cell(mesh="dp_shard=2 tp=2 ep=2 etp=2", copies=2, moe=Moe(experts=7, shared=24), microbatches=2)),
        (4, Cell(mesh="dp_shard=4 ep=4", copies=3, moe=Moe(experts=11, chosen=3), microbatches=3)),
        (4, Cell(mesh="dp_shard=4 ep=2", copies=8, moe=Moe(experts=8), recompute="full")),
        (4, Cell(mesh="dp_shard=4 ep=2", copies=3, moe=Moe(experts=8), microbatches=2, zero=3)),
        (4, Cell(mesh="dp_shard=2 tp=2 ep=4", copies=2, moe=Moe(experts=8, shared=24), recompute="selective")),
        (4, Cell(mesh="dp_shard=2 tp=2 ep=2", copies=1, moe=Moe(experts=8, bias=True), sequence=True, zero=2)),
        (4, Cell(mesh="dp_shard=4 ep=2 etp=2", copies=3, moe=Moe(experts=8), recompute="full", microbatches=2)),
        (4, Cell(mesh="pp=2 cp=2 ep=2", copies=2, moe=Moe(experts=8), microbatches=3)),
        (8, Cell(mesh="pp=2 dp_shard=4 ep=2 etp=2", copies=2, moe=Moe(experts=8), microbatches=3)),
        (8, Cell(mesh="dp_shard=8 ep=2 etp=2", copies=2, moe=Moe(experts=9, balance=0.1, per="batch"))),
    ]


@pytest.mark.parametrize(("ranks", "cell"), thin(hot_cells(), 3), ids=str)
def test_copies_of_busy_experts_change_nothing(ranks: int, cell: Cell) -> None:
    check(ranks, replace(cell, layers=3, moe=replace(cell.moe, skew=6.0)))


def copied(cell: Cell) -> list[tuple[list[int], str, int]]:
    """(expected rows of experts, the placement, rows that this rank computes) of each of three steps of one layer."""
    run = start(cell, experts=HOT)
    module = run.model.get_submodule("layers.1.mlp.experts")
    hot = hot_experts_of(module)
    assert hot is not None
    found = []
    for batch in batches(cell):
        computed: list[int] = []
        plan = DispatchPlan.per_expert

        def per_expert(self: DispatchPlan, computed: list[int] = computed, plan: Any = plan) -> list[int]:
            computed.append(sum(plan(self)))
            return plan(self)

        before = hot.totals, str(hot.placement)
        with patch.object(DispatchPlan, "per_expert", per_expert):
            run.forward_backward(own_rows(batch, run.mesh))
        found.append((*before, computed[0]))
    return found


def test_copies_are_made_of_busy_experts_and_share_their_tokens() -> None:
    cell = Cell(mesh="dp_shard=4 ep=4", layers=2, moe=Moe(experts=8, chosen=1, skew=8.0))
    ranks = pool(4).run(copied, cell)
    for step in range(3):
        totals, drawn = ranks[0][step][:2]
        assert all(rank[step][:2] == (totals, drawn) for rank in ranks), "ranks chose otherwise"
        assert ("c" in drawn.partition("\n")[2].replace("rank", "")) == (step > 0), drawn
    loads = [[rank[step][2] for rank in ranks] for step in range(3)]
    assert max(loads[0]) > 2 * sum(loads[0]) / 4 > max(loads[1])  # of 8 to 10 tokens on a rank


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (
            "dp_shard=2",
            "copies=1 owners='fixed' are about which ranks of ep compute an expert, but the mesh has ep=1 etp=1",
        ),
        ("dp_shard=2 etp=2", "but the mesh has ep=1 etp=2. Use ep > 1, or leave them away."),
    ],
)
def test_copies_are_refused_where_nobody_shares_experts(mesh: str, text: str) -> None:
    with pytest.raises(RankError, match=re.escape(text)):
        run_ranks(2, start, Cell(mesh=mesh, layers=2, moe=Moe(), copies=1))


def test_policies_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(PlanError, match=r"copies=-1 by the last history=5 steps, up to target=1\.05 of the mean\. Use"):
        ExpertPolicy(copies=-1)
    with pytest.raises(PlanError, match=r"owners='best' is not known\. Use fixed or load"):
        ExpertPolicy(owners="best")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"copies, owners, capacity and max_rows are of meshkit's own dispatcher"):
        ExpertPolicy(copies=1, dispatcher=lambda experts, mesh: OneRank(experts))


def sent_between_nodes(locality: float) -> tuple[int, list[int]]:
    """(bytes to other ranks' experts, counts) where every rank is a node of its own."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    run = start(Cell(mesh="dp_shard=2 ep=2", layers=2, moe=Moe(experts=8, locality=locality)))
    del os.environ["LOCAL_WORLD_SIZE"]
    with observe(run.mesh) as seen:
        run.forward_backward(own_rows(batches(Cell(mesh=""))[0], run.mesh))
    sent = sum(message.size * times for message, times in seen.items() if message.op == "all_to_all")
    return sent, run.expert_counts["layers.1.mlp.gate"].tolist()


def test_locality_keeps_tokens_on_their_node() -> None:
    far, some, near = ([sent for sent, _ in pool(2).run(sent_between_nodes, value)] for value in (0.0, 0.2, 10.0))
    assert sum(near) == 0 < sum(some) < sum(far)


def norms_with(
    cell: Cell, factors: list[float | None], max_rows: int | None = None
) -> list[tuple[float, float | None]]:
    """The gradient norm of the first step and the share that was dropped, for each capacity."""
    norms: list[tuple[float, float | None]] = []
    for factor in factors:
        policy = ExpertPolicy(capacity=None if factor is None else Capacity(factor=factor), max_rows=max_rows)
        run = start(cell, experts=policy)
        run.forward_backward(own_rows(batches(cell)[0], run.mesh), microbatches=2)
        share = run.dropped_share
        norms.append((float(mk.step.grad_norm(run)), None if share is None else float(share)))
    return norms


@pytest.mark.parametrize("mesh", ["dp_shard=2 ep=2", "dp_shard=2 etp=2", "tp=2 ep=2", "tp=2", "dp_shard=2", "pp=2"])
def test_capacity_that_suffices_drops_nothing_and_less_drops(mesh: str) -> None:
    cell = Cell(mesh=mesh, layers=2, moe=Moe(experts=8, chosen=2))
    found = pool(2).run(norms_with, cell, [None, 8.0, 0.25])
    for (unlimited, no_share), (enough, none_dropped), (little, dropped) in found:
        assert abs(enough - unlimited) <= 1e-12 * unlimited
        assert abs(little - unlimited) > 1e-6 * unlimited
        assert no_share is None and none_dropped == 0
        assert dropped == found[0][2][1] and 0.7 < dropped < 1  # a quarter of the even share stays, or less


def dtype_of_sums(cell: Cell) -> str:
    """In which dtype outputs of experts are added up."""
    seen: list[torch.dtype] = []

    def combine(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = routing.combine(rows, order, weights)
        seen.append(out.dtype)
        return out

    with patch("meshkit.parallel.expert._dispatch.combine", combine):
        run = start(cell)
        run.forward_backward(own_rows(batches(cell)[0], run.mesh))
    return str(set(seen))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_outputs_of_experts_are_added_in_fp32_under_bf16(recompute: str) -> None:
    cell = Cell(mesh="dp_shard=2 ep=2", layers=2, dtype="float32", bf16=True, moe=Moe(experts=8), recompute=recompute)
    assert pool(2).run(dtype_of_sums, cell) == ["{torch.float32}"] * 2
