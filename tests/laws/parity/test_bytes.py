"""Law 7: the collectives a step runs are those `explain` says, and no others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import meshkit as mk
from meshkit.mesh import DENSE_AXES, EXPERT_AXES
from meshkit.models.llama import LLAMA_PLAN
from meshkit.parallel.expert import AllToAll, DispatchPlan, Placement, dispatch_traffic
from meshkit.preflight.explain import Message, explain
from meshkit.preflight.observe import observe
from meshkit.strategy import ExpertPolicy
from tests.depth import thin
from tests.laws.parity.cases import ROWS, TOKENS, Cell, Moe, batches, build, mesh_for, own_rows, plan_of, start
from tests.world import pool

CHUNKED = mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss(tokens=5))
CELLS = [
    Cell(mesh="dp_shard=4"),
    Cell(mesh="dp_shard=4", zero=2, microbatches=2),
    Cell(mesh="dp_shard=4", zero=1, microbatches=3),
    Cell(mesh="dp_replicate=4", microbatches=2),
    Cell(mesh="dp_replicate=2 dp_shard=2", microbatches=2, tied=True),
    Cell(mesh="tp=4", tied=True),
    Cell(mesh="tp=4", sequence=True, qwen=True),
    Cell(mesh="tp=4", sequence=True, recompute="full", vocab=61, hidden_mlp=45, heads=(9, 3)),
    Cell(mesh="tp=4", sequence=False, recompute="full"),
    Cell(mesh="dp_shard=2 tp=2", sequence=True, recompute="selective", microbatches=2, zero=3, vocab=61),
    Cell(mesh="dp_shard=2 tp=2", sequence=False, recompute="full", microbatches=3, zero=1, qwen=True, tied=True),
    Cell(mesh="dp_replicate=2 tp=2", sequence=True, recompute="full", zero=2, documents=True),
    Cell(mesh="dp_shard=2 tp=2", sequence=True, dtype="float32", bf16=True, qwen=True, vocab=61),
    Cell(mesh="dp_replicate=2 dp_shard=2", dtype="float32", bf16=True, microbatches=2, zero=2),
    Cell(mesh="cp=4", microbatches=2, context=mk.strategy.ContextPolicy(scheme="ring")),
    Cell(mesh="cp=4", recompute="full", context=mk.strategy.ContextPolicy(scheme="all_gather"), heads=(9, 3)),
    Cell(mesh="cp=4", window=3, context=mk.strategy.ContextPolicy(scheme="group_cast"), zero=2),
    Cell(mesh="cp=4", documents=True, microbatches=2, recompute="selective"),
    Cell(mesh="dp_shard=2 cp=2", documents=True, context=mk.strategy.ContextPolicy(scheme="ulysses"), heads=(9, 3)),
    Cell(mesh="cp=4", context=mk.strategy.ContextPolicy(scheme="ring", ulysses=2), dtype="float32", bf16=True),
    Cell(mesh="cp=4", context=mk.strategy.ContextPolicy(groups="by_length"), documents=True, microbatches=3, zero=1),
    Cell(mesh="cp=4", context=mk.strategy.ContextPolicy(groups="flexsp"), recompute="full", microbatches=7),
    Cell(mesh="dp_replicate=2 cp=2", context=mk.strategy.ContextPolicy(scheme="ulysses"), heads=(8, 1)),
    Cell(mesh="cp=2 tp=2", sequence=True, documents=True, recompute="full", heads=(9, 3), vocab=61),
    Cell(mesh="cp=2 tp=2", microbatches=2, tied=True),
    Cell(mesh="pp=4", layers=4, microbatches=3, tied=True),
    Cell(mesh="pp=2 dp_shard=2", layers=4, microbatches=2, schedule="zbv", tied=True),
    Cell(mesh="pp=2 dp_shard=2", layers=4, microbatches=2, schedule="interleaved", tied=True),
    Cell(mesh="pp=2 dp_replicate=2", layers=3, stages=(1, 2), dtype="float32", bf16=True, recompute="full"),
    Cell(mesh="pp=4", layers=4, stages=(0, 2, 2, 0), microbatches=2, tied=True),
    Cell(mesh="pp=2 dp_shard=2", layers=2, stages=(0, 1, 1, 0), schedule="zbv", microbatches=2),
    Cell(mesh="pp=2 tp=2", layers=4, microbatches=2, sequence=True, recompute="full", qwen=True, schedule="zb-h1"),
    Cell(mesh="pp=2 tp=2", layers=4, microbatches=3, vocab=61, tied=True),
    Cell(mesh="pp=2 cp=2", layers=4, microbatches=2, documents=True, schedule="dualpipe-v"),
    Cell(mesh="dp_shard=2 tp=2", sequence=True, vocab=61, microbatches=3, memory=CHUNKED),
    Cell(mesh="pp=2 tp=2", layers=4, microbatches=2, tied=True, memory=CHUNKED),
    Cell(mesh="dp_shard=2 cp=2", zero=3, memory=CHUNKED),
    # 5 rows over 2 data ranks: the second has no row in one of 3 microbatches.
    Cell(mesh="dp_shard=2 cp=2", documents=True, microbatches=3),
    Cell(mesh="dp_shard=2 cp=2", documents=True, microbatches=3, context=mk.strategy.ContextPolicy(scheme="ring")),
    Cell(mesh="pp=2 cp=2", layers=4, documents=True, microbatches=6),
    Cell(mesh="cp=4", mixer="delta", context=mk.strategy.ContextPolicy(scheme="ring", balance="contiguous")),
    Cell(mesh="cp=4", mixer="mamba2", microbatches=2, recompute="full"),
    Cell(mesh="cp=2 tp=2", mixer="delta", documents=True, sequence=True, recompute="selective"),
    Cell(mesh="dp_shard=2 cp=2", mixer="mamba2", documents=True, dtype="float32", bf16=True),
    Cell(mesh="pp=2 cp=2", mixer="delta", layers=4, documents=True, microbatches=2),
]


def observe_step(cell: Cell) -> tuple[Counter[Message], Counter[Message]]:
    run = start(cell)
    mesh = run.mesh
    local = own_rows(batches(cell)[0], mesh)
    masks = [mk.Mask.from_positions(row.unsqueeze(0)) for row in local["position_ids"]] if cell.documents else None
    return seen_and_said(run, local, microbatches=cell.microbatches, said_of=masks)


def observe_masks(cell: Cell) -> tuple[Counter[Message], Counter[Message]]:
    """The masks are given by themselves, one for each row, and not told by positions."""
    run = start(cell)
    local = own_rows(batches(cell)[0], run.mesh)
    masks = [mk.Mask.from_positions(row.unsqueeze(0)) for row in local.pop("position_ids")]
    return seen_and_said(run, local, microbatches=cell.microbatches, mask=masks, said_of=masks)


def seen_and_said(
    run: mk.Run,
    local: dict[str, Tensor],
    *,
    microbatches: int,
    mask: Sequence[mk.Mask] | None = None,
    said_of: Sequence[mk.Mask] | None = None,
) -> tuple[Counter[Message], Counter[Message]]:
    """The collectives of one step, as they were observed and as `explain` says. said_of: the masks that it is told."""
    mesh = run.mesh
    with observe(mesh) as seen:
        run.forward_backward(local, microbatches=microbatches, mask=mask)
        mk.clip_grad_norm(run, 1.0)
    said = explain(
        run,
        rows=local["labels"].shape[0],
        seq_len=TOKENS,
        microbatches=microbatches,
        mask=said_of,
        coordinate={axis: mesh[axis].get_local_rank() for axis in ("pp", "dp_shard", "cp", "tp")},
    )
    return seen, said.messages


def assert_alike(found: Iterable[tuple[Counter[Message], Counter[Message]]]) -> None:
    for seen, said in found:
        assert seen, "a step on several ranks sends something"
        assert seen - said == Counter(), "sent, but not explained"
        assert said - seen == Counter(), "explained, but not sent"


WIRES = mk.strategy.DataPolicy(gather="int8", reduce="int4")
WIRE_CELLS = [
    Cell(mesh="dp_shard=4", microbatches=2, data=WIRES, vocab=61, hidden_mlp=45),
    Cell(mesh="dp_shard=4", zero=1, microbatches=2, data=mk.strategy.DataPolicy(gather="int4")),
    Cell(mesh="dp_replicate=2 dp_shard=2", tied=True, data=mk.strategy.DataPolicy(gather="fp8")),
    Cell(mesh="dp_replicate=2 dp_shard=2", microbatches=2, vocab=61, data=WIRES),
    Cell(mesh="dp_replicate=4", microbatches=2, data=WIRES),
    Cell(mesh="dp_shard=2 tp=2", sequence=True, recompute="full", dtype="float32", bf16=True, qwen=True, data=WIRES),
    Cell(mesh="pp=2 dp_shard=2", layers=4, microbatches=2, tied=True, data=WIRES),
    Cell(mesh="dp_shard=2 cp=2", documents=True, zero=2, microbatches=2, data=WIRES),
]


@pytest.mark.parametrize("cell", [*thin(CELLS, 3), *WIRE_CELLS], ids=str)
def test_observed_collectives_are_the_explained_ones(cell: Cell) -> None:
    assert_alike(pool(4).run(observe_step, cell))


def test_a_microbatch_without_rows_sends_what_is_explained_of_masks_too() -> None:
    # 6 microbatches: the second data rank has 2 rows.
    assert_alike(pool(4).run(observe_masks, Cell(mesh="dp_shard=2 cp=2", documents=True, microbatches=6)))


def test_explaining_needs_no_ranks_and_no_memory() -> None:
    with torch.device("meta"):
        model = build(Cell(mesh="tp=1"))
    said = explain(model, mk.MeshSpec(dp_shard=64, tp=8), plan=LLAMA_PLAN, rows=ROWS, seq_len=TOKENS, sequence=True)
    text = str(said)
    assert "layers.*.self_attn.q_proj.weight" in text
    assert "reduce_scatter" in text


EXPERTS = Moe(experts=11, chosen=2)
EXPERT_CELLS = [
    Cell(mesh="dp_shard=4 ep=4", layers=3, moe=EXPERTS, microbatches=2),
    Cell(mesh="dp_shard=4 ep=2", layers=3, moe=EXPERTS, microbatches=2, data=WIRES),
    Cell(mesh="dp_shard=4 ep=2", layers=3, moe=replace(EXPERTS, shared=24, balance=0.1, per="batch"), zero=2),
    Cell(mesh="dp_shard=4 ep=2 etp=2", layers=3, moe=EXPERTS, recompute="full"),
    Cell(mesh="dp_replicate=2 dp_shard=2 ep=2", layers=3, moe=replace(EXPERTS, z=0.1), recompute="selective"),
    Cell(mesh="dp_shard=2 tp=2 ep=4", layers=3, moe=replace(EXPERTS, balance=0.1), sequence=True, microbatches=2),
    Cell(mesh="dp_shard=2 tp=2 ep=2", layers=3, moe=replace(EXPERTS, shared=24), recompute="full", microbatches=2),
    Cell(mesh="dp_shard=2 tp=2 ep=2", layers=3, moe=EXPERTS, recompute="full", sequence=True),
    Cell(mesh="dp_shard=2 tp=2 etp=2", layers=3, moe=replace(EXPERTS, shared=24), recompute="full"),
    Cell(mesh="dp_shard=2 tp=2", layers=3, moe=replace(EXPERTS, balance=0.1, per="global")),
    Cell(mesh="dp_shard=2 tp=2", layers=3, moe=replace(EXPERTS, shared=24), recompute="selective"),
    Cell(mesh="tp=4 etp=2 ep=2", layers=2, moe=EXPERTS, recompute="full"),
    Cell(mesh="pp=2 dp_shard=2 ep=2", layers=4, moe=EXPERTS, microbatches=3),
    Cell(mesh="cp=4 ep=4", layers=3, moe=EXPERTS, dtype="float32", bf16=True),
]


@dataclass(frozen=True)
class Noting(AllToAll):
    """Also keeps what every call sent."""

    plans: list[DispatchPlan] = field(default_factory=list)

    def plan(self, counts: Callable[[], Tensor], placement: Placement | None = None) -> DispatchPlan:
        self.plans.append(super().plan(counts, placement))
        return self.plans[-1]


def observe_experts(cell: Cell) -> tuple[Counter[Message], Counter[Message], Counter[Message]]:
    """(seen, said, said of the way to the experts), the last for the routing that there was."""
    mesh = mesh_for(cell.mesh)
    made: list[Noting] = []

    def make(experts: int, axes: DeviceMesh) -> Noting:
        made.append(Noting.on(experts, axes))
        return made[-1]

    folded = mesh.spec.ep * mesh.spec.etp > 1
    run = start(cell, experts=ExpertPolicy(dispatcher=make if folded else None))
    local = own_rows(batches(cell)[0], mesh)
    with observe(mesh) as seen:
        run.forward_backward(local, microbatches=cell.microbatches)
        mk.clip_grad_norm(run, 1.0)
    place = {axis: mesh[axis].get_local_rank() for axis in ("pp", "dp_shard", "cp", "tp")}
    rows = local["labels"].shape[0]
    said = explain(
        run,
        rows=rows,
        seq_len=TOKENS,
        microbatches=cell.microbatches,
        coordinate=place,
    )
    routed: Counter[Message] = Counter()
    again = 2 if cell.recompute != "none" else 1
    for plans in (dispatcher.plans for dispatcher in made if dispatcher.plans):
        assert len(plans) == cell.microbatches * again
        for plan in plans:
            told = dispatch_traffic(plan, width=32, itemsize=2 if cell.bf16 else 8)
            for (axis, op, size), times in told.counts.items():
                routed[Message(axis, op, size)] += times
            for (axis, op, size), times in told.rows.items():  # forward each time, and one backward for both
                routed[Message(axis, op, size)] += times + times / again
    return seen, said.messages, routed


def by_ranks(messages: Counter[Message], spec: mk.MeshSpec, rank: int) -> Counter[tuple]:
    """With the ranks of the axis instead of its name: in the two views different axes may have the same ranks."""
    found: Counter[tuple] = Counter()
    for message, times in messages.items():
        axes = re.findall(r"dp_replicate|dp_shard|edp|etp|ep|cp|tp|pp", message.axis)
        view = DENSE_AXES if all(axis in DENSE_AXES for axis in axes) else EXPERT_AXES
        sizes = [getattr(spec, axis) for axis in view]
        grid = torch.arange(spec.world_size).reshape(sizes)
        place = (grid == rank).nonzero()[0].tolist()
        own = grid[tuple(slice(None) if axis in axes else at for axis, at in zip(view, place, strict=True))]
        found[tuple(own.flatten().tolist()), message.op, message.size] += times
    return found


@pytest.mark.parametrize("cell", thin(EXPERT_CELLS, 3), ids=str)
def test_what_is_sent_to_experts_is_predicted_for_the_routing(cell: Cell) -> None:
    for rank, (seen, said, routed) in enumerate(pool(4).run(observe_experts, cell)):
        assert bool(routed) == bool(re.search("ep=|etp=", cell.mesh))
        if routed:  # what is said is for an even routing; gradient norms are all that is reduced on these axes
            dispatch = {m for m in said if m.axis in ("ep", "etp", "ep_etp") and m.op != "all_reduce"}
            said = Counter({message: times for message, times in said.items() if message not in dispatch}) + routed
        spec = mk.MeshSpec.parse(cell.mesh)
        assert by_ranks(seen, spec, rank) - by_ranks(said, spec, rank) == Counter(), "sent, but not explained"
        assert by_ranks(said, spec, rank) - by_ranks(seen, spec, rank) == Counter(), "explained, but not sent"


BUSY = (40, 30, 9, 8, 7, 6, 5, 4, 3, 2, 1)  # of `EXPERTS`
COPY_CELLS = [
    Cell(mesh="dp_shard=4 ep=4", layers=3, moe=EXPERTS, copies=3, microbatches=2),
    Cell(mesh="dp_shard=4 ep=2 etp=2", layers=3, moe=EXPERTS, copies=2, recompute="full"),
    Cell(mesh="dp_shard=4 ep=2", layers=3, moe=replace(EXPERTS, shared=24), copies=2, recompute="selective"),
    Cell(mesh="pp=2 dp_shard=2 ep=2", layers=4, moe=EXPERTS, copies=2, microbatches=3),
    Cell(mesh="dp_shard=2 tp=2 ep=4", layers=3, moe=EXPERTS, copies=1, sequence=True, dtype="float32", bf16=True),
]


def observe_copies(cell: Cell) -> list[tuple[Counter[tuple], Counter[tuple]]]:
    """(seen, said) of a first step, whose copies follow from what is expected, and of a second, from the first's load; what
    is said of rows is for the routing that there was."""
    run = start(cell, experts=ExpertPolicy(copies=cell.copies, expected=BUSY, target=1.0))
    mesh = run.mesh
    place = {axis: mesh[axis].get_local_rank() for axis in ("pp", "dp_shard", "cp", "tp")}
    found = []
    for step in range(2):
        local = own_rows(batches(cell)[step], mesh)
        sizes = {"rows": local["labels"].shape[0], "seq_len": TOKENS, "microbatches": cell.microbatches}
        said = explain(run, coordinate=place, **sizes)
        assert any("copies of" in note for note in said.notes), said.notes
        plans: list[DispatchPlan] = []
        plain = AllToAll.plan

        def noted(
            self: AllToAll, counts: Any, placement: Any = None, plans: list[DispatchPlan] = plans, plain: Any = plain
        ) -> Any:
            plans.append(plain(self, counts, placement))
            return plans[-1]

        with mock.patch.object(AllToAll, "plan", noted), observe(mesh) as seen:
            run.forward_backward(local, microbatches=cell.microbatches)
            mk.clip_grad_norm(run, 1.0)
        again = 2 if cell.recompute != "none" else 1
        told: Counter[Message] = Counter()
        for sent in said.sent:
            if sent.what not in ("tokens to experts", "tokens per expert"):
                told[sent.message] += sent.calls
        for plan in plans:
            traffic = dispatch_traffic(plan, width=32, itemsize=2 if cell.bf16 else 8)
            for (axis, op, size), times in traffic.counts.items():
                told[Message(axis, op, size)] += times
            for (axis, op, size), times in traffic.rows.items():
                told[Message(axis, op, size)] += times + times / again
        for param in run.parameters():
            param.grad = None
        spec, rank = mk.MeshSpec.parse(cell.mesh), mesh.rank
        found.append((by_ranks(seen, spec, rank), by_ranks(told, spec, rank)))
    return found


@pytest.mark.parametrize("cell", thin(COPY_CELLS, 2), ids=str)
def test_what_copies_of_experts_send_is_explained_to_the_byte(cell: Cell) -> None:
    for steps in pool(4).run(observe_copies, cell):
        for seen, said in steps:
            assert seen - said == Counter(), "sent, but not explained"
            assert said - seen == Counter(), "explained, but not sent"


def test_explaining_says_how_experts_are_computed() -> None:
    cell = Cell(mesh="", layers=2, moe=EXPERTS)
    said = explain(build(cell), mk.MeshSpec(dp_shard=2, ep=2), plan=plan_of(cell), rows=2, seq_len=TOKENS)
    text = str(said)
    assert "ep:Shard(0)" in text
    assert "experts: loop: torch's grouped_mm takes no torch.float64" in text
    assert "if tokens chose all experts alike" in text
