"""Experts that change owners between steps change nothing else: training, checkpoints and what is read of a run."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import meshkit as mk
from meshkit.checkpoint import Checkpointer
from meshkit.core.model_state import model_tensors
from meshkit.core.reshard import Exchange
from meshkit.core.sharding import full_tensor
from meshkit.errors import PlanError
from meshkit.mesh import replica_mesh
from meshkit.moving import experts_at_home, move_experts
from meshkit.optim.outer import DiLoCo, OuterOptimizer
from meshkit.parallel.expert import Placement, hot_experts_of, placements_of
from meshkit.strategy import ExpertPolicy
from tests.compare_shards import computed_once, difference
from tests.depth import thin
from tests.laws.parity.cases import (
    ADAM,
    Cell,
    Moe,
    batches,
    build,
    mesh_for,
    own_rows,
    plan_of,
    reference,
    start,
)
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


TABLE, UNEVEN = (1, 1, 0, 1, 0, 0, 0, 1), (1, 1, 1, 1, 1, 1, 1, 0)


def asked_otherwise(of_rank: list[dict[str, tuple[int, ...]] | None]) -> None:
    run = start(Cell(mesh="dp_shard=2 ep=2", moe=SKEWED), experts=ExpertPolicy(owners="load"))
    move_experts(run, None, of_rank[run.mesh.rank])


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            {LAYERS[0]: (0, 1) * 4},
            "rank 1 asks for owners={'layers.1.mlp.experts': (0, 1, 0, 1, 0, 1, 0, 1)}, and rank 0 for {",
        ),
        (
            {},
            "rank 1 asks for owners={}, and rank 0 for {'layers.1.mlp.experts': (1, 1, 0, 1, 0, 0, 0, 1)}. Give the same",
        ),
        (None, "rank 1 asks for owners=None, and rank 0 for {"),
    ],
)
def test_ranks_that_ask_for_other_owners_are_refused(other: dict[str, tuple[int, ...]] | None, text: str) -> None:
    with pytest.raises(RankError, match=re.escape(text)):
        run_ranks(2, asked_otherwise, [{LAYERS[0]: TABLE}, other])


def owners_on_other_nodes() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(nodes of this rank's ep, owners that were chosen by load): hosts have three ranks, and ep four."""
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    run = start(Cell(mesh="dp_shard=8 ep=4", moe=SKEWED), experts=ExpertPolicy(owners="load"))
    hot = hot_experts_of(run.model.get_submodule(LAYERS[0]))
    assert hot is not None
    hot.note([30, 4, 52, 53, 57, 52, 27, 13])
    move_experts(run, None)
    del os.environ["LOCAL_WORLD_SIZE"]
    return hot.nodes, hot.placement.owners


def test_replicas_on_other_nodes_choose_the_same_owners() -> None:
    found = pool(8).run(owners_on_other_nodes)
    assert len({tuple(node == nodes[0] for node in nodes) for nodes, _ in found}) > 1
    assert len({owners for _, owners in found}) == 1


class Averaging(torch.optim.SGD):
    """Keeps means of its parameters beside its state."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params, lr=0.1)
        self.means = [param.detach().clone() for param in params]


def refused_with(what: str, owners: tuple[int, ...]) -> None:
    cell = Cell(mesh="dp_shard=2 ep=2", moe=SKEWED, dtype="float32")
    model, policy = build(cell), ExpertPolicy(owners="load", spare=3)
    if what == "hook":
        model.get_parameter(f"{LAYERS[0]}.down_proj").register_hook(lambda grad: grad)
    offload = mk.strategy.OptimizerPolicy(offload=mk.strategy.OptimizerOffload())
    memory = mk.MemoryPolicy(optimizer=offload) if what == "offload" else None
    run = mk.parallelize(model, mesh_for(cell.mesh), plan=plan_of(cell), experts=policy, memory=memory)
    optimizer = {"muon": lambda: mk.muon(run, lr=0.1), "means": lambda: Averaging(list(run.parameters()))}.get(
        what, lambda: mk.adamw(run, lr=0.1)
    )()
    move_experts(run, optimizer, {LAYERS[0]: owners})


@pytest.mark.parametrize(
    ("what", "owners", "text"),
    [
        (
            "hook",
            TABLE,
            "'layers.1.mlp.experts.down_proj' has a hook, which gets all experts in the order of the",
        ),
        (
            "means",
            TABLE,
            "a Averaging keeps tensors or an optimizer in its attribute 'means', which would not",
        ),
        (
            "muon",
            UNEVEN,
            "would have [1, 7] experts on the ranks of ep, and not [4, 4], for which the WholeMatrices of",
        ),
        (
            "offload",
            UNEVEN,
            "and not [4, 4], for which the memory on the host of OffloadedAdamW was made. Exchange",
        ),
    ],
)
def test_what_would_not_move_along_is_refused(what: str, owners: tuple[int, ...], text: str) -> None:
    with pytest.raises(RankError, match=re.escape(text)):
        run_ranks(2, refused_with, what, owners)


def read_elsewhere() -> tuple[str, str]:
    """What is said of reading a run whose last layer alone has moved, which one of two stages has."""
    run = start(Cell(mesh="pp=2 dp_shard=2 ep=2", moe=SKEWED, layers=4), experts=ExpertPolicy(owners="load"))
    move_experts(run, None, {"layers.3.mlp.experts": TABLE})
    said = []
    for read in (lambda: model_tensors(run.model), run.model.state_dict):
        try:
            read()
            said.append("read")
        except PlanError as error:
            said.append(str(error))
    with experts_at_home(run, None):
        run.model.state_dict()
    return said[0], said[1]


def test_every_stage_refuses_what_one_would() -> None:
    """Reading is often a collective: the others would wait."""
    for said in pool(4).run(read_elsewhere):
        assert all(each.startswith("the experts of 'layers.3.mlp.experts' are with other owners") for each in said), (
            said
        )


def copies_that_are_expected() -> list[int]:
    policy = ExpertPolicy(owners="load", copies=1, expected=(90, 80, 1, 1, 1, 1, 1, 1))
    run = start(Cell(mesh="dp_shard=2 ep=2", moe=SKEWED), experts=policy)
    made = []
    for table in (None, {LAYERS[0]: TABLE}):
        if table is not None:
            move_experts(run, None, table)
        made.append((placements_of(run.model) or {})[LAYERS[0]].copies_made)
    return made


def test_a_load_that_is_expected_is_not_forgotten_by_a_move() -> None:
    for before, after in pool(2).run(copies_that_are_expected):
        assert before and after


def met(moved: bool) -> tuple[str, list[torch.Tensor]]:
    """(what a meeting of replicas whose experts are away says, parameters after meetings at home)."""
    mesh, cell = mk.init_mesh("dp_replicate=2 dp_shard=2 ep=2"), Cell(mesh="dp_shard=2 ep=2", moe=SKEWED)
    run = mk.parallelize(
        build(cell), replica_mesh(mesh), plan=plan_of(cell), experts=ExpertPolicy(owners="load", spare=3)
    )
    inner = mk.adamw(run, **ADAM)
    outer, said = OuterOptimizer(run, inner, mesh, DiLoCo(every=1)), ""
    for number, batch in enumerate(batches(cell)):
        run.forward_backward({name: rows[number + 1 :] for name, rows in own_rows(batch, mesh).items()})
        inner.step()
        inner.zero_grad()
        if moved:  # each replica otherwise
            table = UNEVEN if mesh["dp_replicate"].get_local_rank() else TABLE
            move_experts(run, outer, {LAYERS[0]: table[number:] + table[:number]})
            with pytest.raises(PlanError) as refusal:
                outer.step()
            said = str(refusal.value)
        with experts_at_home(run, outer):
            outer.step()
    with experts_at_home(run, outer):
        return said, [whole(param) for param in run.parameters()]


def test_replicas_that_step_alone_meet_with_experts_at_home() -> None:
    plain, moved = (pool(4).run(met, each) for each in (False, True))
    for (_, expected), (said, found) in zip(plain, moved, strict=True):
        assert said.startswith("the experts of 'layers.1.mlp.experts' are with other owners")
        assert all(float((a - b).abs().max()) <= TOL_FP64 for a, b in zip(expected, found, strict=True))


def moved_in_parts() -> tuple[list[int], float]:
    """(experts that this rank got in each exchange, the largest change after they have come home)."""
    run = start(Cell(mesh="dp_shard=2 ep=2", moe=SKEWED), experts=ExpertPolicy(owners="load", spare=3))
    optimizer = mk.adamw(run, **ADAM)
    run.forward_backward(own_rows(batches(Cell(mesh=""))[0], run.mesh))
    optimizer.step()
    optimizer.zero_grad()
    held = [tensor for param in run.parameters() for tensor in (param, *optimizer.state[param].values())]
    before, got = [whole(tensor) for tensor in held], list[int]()

    def exchange(plan: Any, *args: Any) -> Any:
        def noting(src: Any, dst: Any) -> None:
            got.append(len(dst.local))
            Exchange(plan, *args)(src, dst)

        return noting

    with (
        mock.patch("meshkit.moving._experts.DEFAULT_BUCKET_BYTES", 20_000),  # a stack is larger on one rank
        mock.patch("meshkit.moving._experts.Exchange", exchange),
    ):
        move_experts(run, optimizer, {LAYERS[0]: UNEVEN})
    with experts_at_home(run, optimizer):
        changes = [float((whole(after) - was).abs().max()) for after, was in zip(held, before, strict=True)]
    return got, max(changes)


def test_a_move_takes_the_memory_of_one_stack() -> None:
    for rank, (got, change) in enumerate(pool(2).run(moved_in_parts)):
        assert got == [UNEVEN.count(rank)] * 9  # gate, up and down, each with two moments
        assert change == 0
