"""Experts that change owners between steps change nothing else: training, checkpoints and what is read of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import meshkit as mk
from meshkit.checkpoint import Checkpointer
from meshkit.core.model_state import model_tensors
from meshkit.core.sharding import full_tensor
from meshkit.errors import PlanError
from meshkit.moving import experts_at_home, move_experts
from meshkit.parallel.expert import Placement, placements_of
from meshkit.strategy import ExpertPolicy
from tests.compare_shards import computed_once, difference
from tests.depth import thin
from tests.laws.parity.cases import ADAM, Cell, Moe, batches, own_rows, reference, start
from tests.world import RankError, pool, run_ranks

TOL_FP64 = 1e-10  # only the order of sums differs
LAYERS = ("layers.1.mlp.experts", "layers.2.mlp.experts")


@dataclass(frozen=True, kw_only=True)
class Case:
    cell: Cell
    spare: int = 0
    copies: int = 0
    owners: tuple[int, ...] | None = None  # None: by load

    @property
    def policy(self) -> ExpertPolicy:
        return ExpertPolicy(owners="load", spare=self.spare, copies=self.copies)


SKEWED = Moe(experts=8, skew=6.0)
CASES = [
    (2, Case(cell=Cell(mesh="dp_shard=2 ep=2", moe=SKEWED), owners=(1, 1, 0, 1, 0, 0, 0, 1))),
    (2, Case(cell=Cell(mesh="dp_shard=2 ep=2", moe=SKEWED), spare=3, owners=(1, 1, 1, 1, 1, 1, 1, 0))),
    (4, Case(cell=Cell(mesh="dp_shard=4 ep=4", moe=SKEWED, microbatches=2), spare=2, copies=1)),
    (4, Case(cell=Cell(mesh="dp_shard=4 ep=2", moe=SKEWED), copies=2)),
    (4, Case(cell=Cell(mesh="dp_shard=2 tp=2 ep=2 etp=2", moe=SKEWED, recompute="full"), spare=2, copies=1)),
    (4, Case(cell=Cell(mesh="dp_replicate=2 dp_shard=2 ep=2", moe=SKEWED, zero=3), owners=(1, 0) * 4)),
    (4, Case(cell=Cell(mesh="pp=2 dp_shard=2 ep=2", moe=SKEWED, microbatches=2), spare=1, copies=1)),
    (8, Case(cell=Cell(mesh="pp=2 dp_shard=4 ep=2 etp=2", moe=SKEWED, microbatches=2), spare=1, copies=1)),
    (8, Case(cell=Cell(mesh="dp_shard=8 ep=2 etp=2", moe=SKEWED, layers=3), copies=1)),
]


def trained(case: Case) -> tuple[float, float, bool]:
    """(largest error of a loss, of a parameter after three steps, whether experts were away from home)."""
    cell = case.cell
    run = start(cell, experts=case.policy)
    optimizer = mk.adamw(run, **ADAM)
    losses, _, _, parameters = computed_once(reference, cell)
    worst, away = 0.0, False
    for step, batch in enumerate(batches(cell)):
        loss = run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches)
        mk.clip_grad_norm(run, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        worst = max(worst, abs(float(loss) - losses[step]))
        table = (
            None
            if case.owners is None
            else dict.fromkeys(run.resolved.experts, case.owners[step:] + case.owners[:step])
        )
        move_experts(run, optimizer, table)
        tables = (placements_of(run.model) or {}).values()
        away |= any(each.owners != Placement.contiguous(8, each.ranks).owners for each in tables)
    with experts_at_home(run, optimizer):
        error = max(difference(p, parameters[name]) for name, p in run.named_parameters())
    return worst, error, away


def id_of(value: Any) -> str:
    return f"{value.cell.mesh} spare={value.spare} copies={value.copies}" if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(("ranks", "case"), thin(CASES, 3), ids=id_of)
def test_training_goes_on_as_if_no_expert_had_moved(ranks: int, case: Case) -> None:
    found = pool(ranks).run(trained, case)
    for loss, parameter, _ in found:
        assert loss <= TOL_FP64
        assert parameter <= TOL_FP64
    assert any(away for *_, away in found), "no expert has moved"


def saved_and_loaded(case: Case, after: Cell, folder: str) -> float:
    """The largest difference between parameters that go on for two steps, and those that were saved after the first, with
    experts away from home, and go on elsewhere."""
    cell = case.cell
    run = start(cell, experts=case.policy)
    optimizer = mk.adamw(run, **ADAM)
    first, second, _ = batches(cell)

    def step(run: mk.Run, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
        run.forward_backward(own_rows(batch, run.mesh))
        optimizer.step()
        optimizer.zero_grad()

    step(run, optimizer, first)
    move_experts(run, optimizer, None if case.owners is None else dict.fromkeys(run.resolved.experts, case.owners))
    moved = {name: each.owners for name, each in (placements_of(run.model) or {}).items()}
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, run, optimizer)
    assert moved == {name: each.owners for name, each in (placements_of(run.model) or {}).items()}, "not back again"
    step(run, optimizer, second)
    other = start(after)
    other_optimizer = mk.adamw(other, **ADAM)
    with Checkpointer(folder) as checkpointer:
        checkpointer.load(other, other_optimizer)
    step(other, other_optimizer, second)
    with experts_at_home(run, optimizer):
        here = {name: whole(p) for name, p in run.named_parameters()}
    # Loading where experts are away brings them home.
    with Checkpointer(folder) as checkpointer:
        checkpointer.load(run, optimizer)
    assert all(each.owners == tuple(sorted(each.owners)) for each in (placements_of(run.model) or {}).values())
    step(run, optimizer, second)
    again = {name: whole(p) for name, p in run.named_parameters()}
    there = {name: whole(p) for name, p in other.named_parameters()}
    common = here.keys() & there.keys()
    return max(float((here[name] - each[name]).abs().max()) for name in common for each in (there, again))


def whole(param: torch.Tensor) -> torch.Tensor:
    return full_tensor(param).clone()


@pytest.mark.parametrize(
    ("ranks", "case", "after"),
    [
        (2, CASES[1][1], Cell(mesh="tp=2", moe=SKEWED)),
        (4, CASES[3][1], Cell(mesh="dp_shard=2 tp=2 ep=2 etp=2", moe=SKEWED)),
    ],
    ids=id_of,
)
def test_a_checkpoint_is_that_of_the_single_device_model(ranks: int, case: Case, after: Cell, tmp_path: Path) -> None:
    assert max(pool(ranks).run(saved_and_loaded, case, after, str(tmp_path))) <= TOL_FP64


def read_away() -> str:
    run = start(Cell(mesh="dp_shard=2 ep=2", moe=SKEWED), experts=ExpertPolicy(owners="load"))
    move_experts(run, None, {LAYERS[0]: (1, 1, 0, 1, 0, 0, 0, 1)})
    try:
        model_tensors(run.model)
    except PlanError as error:
        return str(error)
    return "read"


def test_reading_a_run_by_the_order_of_one_device_is_refused_while_experts_are_away() -> None:
    for said in pool(2).run(read_away):
        assert re.match("the experts of 'layers.1.mlp.experts' are with other owners than .*experts_at_home", said)


def refused(policy: ExpertPolicy, cell: Cell, owners: dict[str, tuple[int, ...]] | None, gradients: bool) -> None:
    run = start(cell, experts=policy)
    if gradients:
        run.forward_backward(own_rows(batches(cell)[0], run.mesh))
    move_experts(run, None, owners)


@pytest.mark.parametrize(
    ("policy", "mesh", "owners", "gradients", "text"),
    [
        (ExpertPolicy(copies=1), "dp_shard=2 ep=2", None, False, "owners='fixed'. Make the run with ExpertPolicy("),
        (ExpertPolicy(owners="load"), "dp_shard=2 ep=2", None, True, "has a gradient, which does not move"),
        (ExpertPolicy(owners="load"), "dp_shard=2 ep=2", {"a": (0, 1)}, False, "'a' is no module of experts"),
        (ExpertPolicy(owners="load"), "dp_shard=2 ep=2", {LAYERS[0]: (0, 1)}, False, "has 8 experts, not 2"),
        (
            ExpertPolicy(owners="load"),
            "dp_shard=2 ep=2",
            {LAYERS[0]: (1,) * 8},
            False,
            "would leave rank 0 of ep without",
        ),
        (
            ExpertPolicy(owners="load"),
            "dp_shard=4 ep=2",
            {LAYERS[0]: (0, 1, 1, 1, 1, 1, 1, 1)},
            False,
            "is sharded by FSDP, whose shards are of [4, 4] experts, but the table has [1, 7]",
        ),
    ],
)
def test_what_cannot_move_is_refused_on_every_rank(
    policy: ExpertPolicy, mesh: str, owners: dict[str, tuple[int, ...]] | None, gradients: bool, text: str
) -> None:
    with pytest.raises(RankError, match=re.escape(text)):
        run_ranks(4 if "4" in mesh else 2, refused, policy, Cell(mesh=mesh, moe=SKEWED), owners, gradients)
