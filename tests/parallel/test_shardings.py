"""Every row of the table of shardings equals one device, sends what is explained and holds what the closed form says."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshkit as mk
from meshkit.checkpoint import Checkpointer
from meshkit.core.sharding import full_tensor
from meshkit.errors import PlanError
from meshkit.parallel.data import before_microbatch
from meshkit.parallel.shardings import shard_mesh
from meshkit.preflight.estimate._estimate import count_parameters, fake_mesh, tracked_step, tracker_of
from meshkit.preflight.estimate._tracker import GROUPS
from meshkit.preflight.explain import Message
from meshkit.strategy import LEVELS, DataPolicy, Shardings
from tests.compare_shards import computed_once, difference
from tests.depth import thin
from tests.laws.parity.cases import (
    ADAM,
    MAX_NORM,
    Cell,
    Moe,
    batches,
    build,
    mesh_for,
    own_rows,
    reference,
    run_cell,
    start,
)
from tests.laws.parity.test_bytes import assert_alike, observe_step
from tests.laws.parity.test_compile import run_compiled_cell
from tests.parallel.test_wires import against_definition, steps
from tests.tiny import tiny_config
from tests.world import pool

TOL_FP64 = 1e-10  # only the order of summation differs
NESTED = "dp_replicate=2 dp_shard=2x2"
ROWS = [
    DataPolicy(parameters=parameters, gradients=gradients, states=states)
    for parameters, gradients, states in product(LEVELS, repeat=3)
    if states != "none" and max(map(LEVELS.index, (parameters, gradients))) <= LEVELS.index(states)
]


REAL = ("all-all-all", "node-all-all", "node-node-all", "node-all-replicas", "none-node-node", "none-none-replicas")


def name_of(row: DataPolicy) -> str:
    return f"{row.parameters}-{row.gradients}-{row.states}"


def check(world: int, cell: Cell) -> None:
    for outcome in pool(world).run(run_cell, cell):
        assert outcome.loss <= TOL_FP64, cell
        assert outcome.gradient <= TOL_FP64, (outcome.worst, cell)
        assert outcome.norm <= TOL_FP64, cell
        assert outcome.parameter <= TOL_FP64, cell


@pytest.mark.parametrize("row", thin(ROWS, 9), ids=name_of)
def test_every_row_equals_one_device_and_sends_what_is_explained(row: DataPolicy) -> None:
    # Five rows on eight ranks: three have none. 61 words and 45 features are no multiple of a level.
    cell = Cell(mesh=NESTED, data=row, microbatches=1 + ROWS.index(row) % 3, vocab=61, hidden_mlp=45)
    check(8, cell)
    assert_alike(pool(8).run(observe_step, cell))


HPZ = DataPolicy(parameters="node")
PARO_IIG = DataPolicy(parameters="node", gradients="node", states="all")
MICS = DataPolicy(states="node")
THREE = DataPolicy(parameters="node", gradients="all", states="replicas")
TOGETHER = [
    (8, Cell(mesh="dp_shard=2x2 tp=2", data=HPZ, sequence=True, recompute="selective", microbatches=2, vocab=61)),
    (8, Cell(mesh="dp_shard=2x2 tp=2", data=MICS, recompute="full", microbatches=3, qwen=True, tied=True)),
    (8, Cell(mesh="dp_shard=2x2 cp=2", data=PARO_IIG, documents=True, microbatches=3, vocab=61)),
    (
        8,
        Cell(
            mesh="dp_replicate=2 dp_shard=2 cp=2", data=DataPolicy(parameters="all", states="replicas"), hidden_mlp=45
        ),
    ),
    (8, Cell(mesh="dp_replicate=2 dp_shard=2x2", data=THREE, moe=Moe(), layers=3, microbatches=2)),
    (8, Cell(mesh="dp_shard=2x2 tp=2 ep=2", data=PARO_IIG, moe=Moe(shared=24), layers=3, microbatches=2)),
    (4, Cell(mesh="dp_shard=2x2 ep=2", data=HPZ, moe=Moe(), layers=3, microbatches=2, recompute="selective")),
    # One microbatch: backward gathers experts from the copies of forward.
    (4, Cell(mesh="dp_shard=2x2 ep=2", data=HPZ, moe=Moe(), layers=3)),
    (8, Cell(mesh="pp=2 dp_shard=2x2", data=MICS, layers=4, microbatches=2, tied=True)),
    (8, Cell(mesh="pp=2 dp_replicate=2 dp_shard=2", data=DataPolicy(states="replicas"), layers=4, microbatches=3)),
    (4, Cell(mesh="dp_shard=2x2", data=PARO_IIG, all_masked_microbatch=True, microbatches=3)),
    (4, Cell(mesh="dp_shard=1x4", data=HPZ)),
    (4, Cell(mesh="dp_replicate=4", data=DataPolicy(states="replicas"))),
]


@pytest.mark.parametrize(("world", "cell"), TOGETHER, ids=str)
def test_rows_together_with_other_choices_equal_one_device(world: int, cell: Cell) -> None:
    check(world, cell)
    found = pool(world).run(observe_step, cell)
    if cell.moe is not None:  # which tokens go where is said for an even routing
        found = [(without_tokens(seen), without_tokens(said)) for seen, said in found]
    assert_alike(found)


def test_compiled_blocks_gather_from_secondary_copies_and_equal_one_device() -> None:
    cell = Cell(mesh="dp_shard=2x2", data=PARO_IIG, compile="aot_eager", microbatches=2)
    for outcome in pool(4).run(run_compiled_cell, cell):
        assert max(outcome.loss, outcome.norm, outcome.gradient, outcome.parameter) <= TOL_FP64


def without_tokens(messages: Counter[Message]) -> Counter[Message]:
    return Counter({each: times for each, times in messages.items() if each.axis not in ("ep", "tp", "mesh")})


# ----------------------------------------------------------------------------------------------------------- quantized wires


@pytest.mark.parametrize(
    ("cell", "row"),
    [
        # What a first hop has rounded a second one leaves as it is: blocks begin at the same places.
        (
            Cell(mesh="dp_shard=2x2", vocab=61, hidden_mlp=45, microbatches=2),
            DataPolicy(parameters="node", gather="int8"),
        ),
        (Cell(mesh="dp_shard=2x2", qwen=True), DataPolicy(parameters="node", gather="int4", reduce="int4")),
        (
            Cell(mesh="dp_shard=2x2", microbatches=2, recompute="full"),
            DataPolicy(parameters="node", gradients="node", gather="fp8"),
        ),
        (Cell(mesh="dp_shard=2x2", tied=True), DataPolicy(gradients="none", reduce="int8", gather="int8")),
    ],
    ids=["int8", "int4 both ways", "fp8 and sums in nodes", "whole gradients"],
)
def test_rounded_gathers_in_two_hops_equal_the_definition(cell: Cell, row: DataPolicy) -> None:
    cell = replace(cell, data=row)
    assert max(pool(4).run(against_definition, cell, row)) < TOL_FP64
    assert_alike(pool(4).run(observe_step, cell))


def finite(cell: Cell) -> bool:
    run = start(cell)
    optimizer = mk.adamw(run, **ADAM)
    losses = []
    for batch in batches(cell):
        losses.append(run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches))
        mk.clip_grad_norm(run, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return bool(torch.stack(losses).isfinite().all()) and abs(float(losses[0]) - reference(cell)[0][0]) < 0.05


@pytest.mark.parametrize("row", [HPZ, PARO_IIG, MICS], ids=str)
def test_bf16_is_near_one_device(row: DataPolicy) -> None:
    cell = Cell(mesh="dp_shard=2x2", data=row, microbatches=2, dtype="float32", bf16=True)
    assert pool(4).run(finite, cell) == [True] * 4
    assert_alike(pool(4).run(observe_step, cell))


# ---------------------------------------------------------------------------------------------------- a copy is never stale


def evaluated_between() -> list[float]:
    """Differences between losses of evaluations in the middle of a training and those of its parameters on one device."""
    cell = Cell(mesh="dp_shard=2x2", data=HPZ, microbatches=2)
    run, plain = start(cell), build(cell)
    optimizer, found = mk.adamw(run, **ADAM), []
    for batch in batches(cell):
        rows = own_rows(batch, run.mesh)
        run.forward_backward(rows, microbatches=2)
        optimizer.step()
        optimizer.zero_grad()
        summed, tokens = run.evaluate(rows)
        plain.load_state_dict({name: full_tensor(param) for name, param in run.named_parameters()}, strict=False)
        logits = plain(batch["input_ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100)
        found.append(float((summed / tokens - loss.detach()).abs()))
    return found


def test_an_evaluation_after_a_step_sees_the_new_parameters() -> None:
    assert max(max(each) for each in pool(4).run(evaluated_between)) < TOL_FP64


# --------------------------------------------------------------------------------------------------------------------- memory

SHAPE = tiny_config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
ORIGIN = {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 0}
SIZES = {"none": 1, "node": 2, "all": 4, "replicas": 8}  # ranks of each level of NESTED


def held_between_microbatches(mesh: mk.Mesh, row: DataPolicy) -> dict[str, int]:
    """Bytes that a rank has allocated when the second microbatch of the second step begins."""
    with torch.device("meta"):
        model = mk.models.Llama(SHAPE)
    run = mk.parallelize(model, mesh, plan=mk.models.LLAMA_PLAN, data=row)
    optimizer, tracker, found = mk.adamw(run, lr=1e-3), tracker_of(run), []

    def loss(model: Any, part: Any) -> Tensor:
        gc.collect()
        found.append(dict(zip(GROUPS, tracker.now(), strict=True)))
        return mk.step.next_token_loss(model, part)

    batch = {key: torch.zeros(2, 16, dtype=torch.int64) for key in ("input_ids", "labels")}
    with tracker:
        count_parameters(tracker, run.model)
        for _ in range(2):
            tracked_step(tracker, run, optimizer, batch, 2, mk.step.additive(loss))
    return found[3]


def held_on_a_rank(rows: list[DataPolicy]) -> list[dict[str, int]]:
    return [held_between_microbatches(mesh_for(NESTED), row) for row in rows]


def closed_form(row: DataPolicy) -> dict[str, int]:
    """Bytes of fp32 parameters with AdamW; every size of the model is a multiple of 8."""
    with torch.device("meta"):
        params = list(mk.models.Llama(SHAPE).parameters())
    whole = 4 * sum(param.numel() for param in params)
    assert row.parameters is not None and row.gradients is not None and row.states is not None
    shard = whole // SIZES[row.states]
    last = 4 * SHAPE.vocab_size * SHAPE.hidden_size  # FSDP keeps the last buffer that it reduced: the embedding's
    partial = row.gradients not in ("none", row.states)
    return {
        "parameters": shard,
        "optimizer state": 2 * shard + 4 * len(params),
        "gathered parameters": 0 if row.parameters == row.states else whole // SIZES[row.parameters],
        "gradients": whole // SIZES[row.gradients] + partial * shard + (row.gradients != "none") * last,
    }


def summed(found: dict[str, int]) -> dict[str, int]:
    gradients = found["gradients"] + found["gradients in reduction"]
    return {
        **{key: found[key] for key in ("parameters", "optimizer state", "gathered parameters")},
        "gradients": gradients,
    }


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_an_estimate_holds_between_microbatches_what_the_closed_form_says(row: DataPolicy) -> None:
    with fake_mesh(mk.MeshSpec.parse(NESTED), ORIGIN, kernels="cpu") as mesh:
        assert summed(held_between_microbatches(mesh, row)) == closed_form(row)


def test_ranks_hold_between_microbatches_what_the_closed_form_says() -> None:
    rows = [row for row in ROWS if name_of(row) in REAL]
    for of_rank in pool(8).run(held_on_a_rank, rows):
        for row, found in zip(rows, of_rank, strict=True):
            real, expected = summed(found), closed_form(row)
            # gloo may hold the buffers of a finished message a moment longer.
            assert real.pop("gradients") == pytest.approx(expected.pop("gradients"), rel=0.5)
            assert real == expected, name_of(row)


# --------------------------------------------------------------------------------------------------- checkpoints and moves


def saved_and_gone_on(before: Cell, after: Cell, folder: str) -> float:
    """How far a run that goes on under another row ends from one device."""
    run = start(before)
    optimizer = mk.adamw(run, **ADAM)
    steps(run, optimizer, before, slice(0, 2))
    with Checkpointer(folder, asynchronous=False) as checkpointer:
        checkpointer.save(2, run, optimizer)
    again = start(after)
    optimizer = mk.adamw(again, **ADAM)
    with Checkpointer(folder, asynchronous=False) as checkpointer:
        checkpointer.load(again, optimizer, step=2)
    steps(again, optimizer, after, slice(2, 3))
    *_, parameters = computed_once(reference, before)
    return max(difference(param, parameters[name]) for name, param in again.named_parameters())


@pytest.mark.parametrize(
    ("before", "after"), [(HPZ, THREE), (THREE, MICS), (MICS, DataPolicy(gradients="none", parameters="none"))], ids=str
)
def test_a_checkpoint_of_one_row_goes_on_under_another(before: DataPolicy, after: DataPolicy, tmp_path: Path) -> None:
    one = Cell(mesh=NESTED, data=before, microbatches=2, vocab=61)
    found = pool(8).run(saved_and_gone_on, one, replace(one, data=after), str(tmp_path))
    assert max(found) < TOL_FP64


def moved(before: Cell, after: DataPolicy) -> float:
    run = start(before)
    optimizer = mk.adamw(run, **ADAM)
    steps(run, optimizer, before, slice(0, 2))
    run.move(replace(run.strategy, mesh=run.mesh.spec, data=after), optimizer=optimizer)
    steps(run, optimizer, before, slice(2, 3))
    *_, parameters = computed_once(reference, before)
    return max(difference(param, parameters[name]) for name, param in run.named_parameters())


def test_a_run_moves_from_one_row_to_another() -> None:
    assert max(pool(8).run(moved, Cell(mesh=NESTED, data=HPZ, vocab=61), THREE)) < TOL_FP64


# ------------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        ({"parameters": "nodes"}, r"parameters='nodes'\): there are no such ranks to shard over"),
        ({"states": "none"}, "whole copies of everything are what the axis dp_replicate holds"),
        ({"parameters": "all", "states": "node"}, "parameters cannot be sharded further. Use states='all'"),
        ({"gradients": "replicas"}, "gradients cannot be sharded further. Use states='replicas'"),
    ],
)
def test_what_no_mesh_could_have_is_refused_at_once(policy: dict[str, Any], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        DataPolicy(**policy)


@pytest.mark.parametrize(
    ("mesh", "choices", "match"),
    [
        ("dp_shard=4", {"data": HPZ}, "parameters='node'.: this mesh tells no nodes apart. .* dp_shard=2x2"),
        (
            "dp_shard=2x2",
            {"data": HPZ, "zero": 3},
            "zero=3 and DataPolicy.parameters='node'.: two places for one choice",
        ),
        ("pp=2 dp_shard=2x2", {"data": HPZ}, "with pp: parameters are gathered once a step .* so both are 'none'"),
        (
            "dp_shard=2x2",
            {"data": DataPolicy(gradients="node", reduce="int4")},
            "reduce='int4'. with gradients='node', states='all': rounded gradients are reduced in one hop",
        ),
    ],
)
def test_what_a_mesh_cannot_do_is_refused_by_every_verb(mesh: str, choices: dict[str, Any], match: str) -> None:
    model = build(Cell(mesh="", layers=4))
    for verb in (mk.explain, mk.estimate):
        with pytest.raises(PlanError, match=match):
            verb(model, mesh, plan=mk.models.LLAMA_PLAN, rows=2, seq_len=16, **choices)


def alone() -> float:
    """Two microbatches in a loop of one's own: the largest difference of a gradient from one device."""
    mesh, row = mk.init_mesh("dp_shard=2x2"), Shardings("node", "node", "all")
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Linear(9, 3)).double()
    plain = copy.deepcopy(model)
    mk.fully_shard(model, shard_mesh(mesh, row), units=["0", "1"], zero=row)
    rows = torch.randn(8, 7, dtype=torch.float64)
    for index, part in enumerate(rows.chunk(4)[mesh.rank].chunk(2)):
        before_microbatch(model, row=row, first=not index, last=bool(index))
        model(part).square().sum().backward()
    plain(rows).square().sum().backward()
    expected = dict(plain.named_parameters())
    return max(difference(param.grad, expected[name].grad) for name, param in model.named_parameters())


def test_a_loop_of_ones_own_takes_a_row() -> None:
    assert max(pool(4).run(alone)) < TOL_FP64
