"""Every way to save memory together with the others, on meshes: training equals one device, and explains itself."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import meshkit as mk
from meshkit.core.gradient import gradient_of
from meshkit.core.sharding import local_tensor
from meshkit.strategy import OptimizerOffload, OptimizerPolicy, Recompute
from tests.depth import draws
from tests.laws.parity.cases import MAX_NORM, Cell, Moe, batches, build, own_rows, plan_of, run_cell, start
from tests.laws.parity.test_bytes import observe_step
from tests.world import pool, run_ranks

TOL_FP64 = 1e-10  # only the order of summation differs
ON_HOST = OptimizerPolicy(offload=OptimizerOffload())
WITH_EXPERTS = Moe(shared=24)
MESHES = {
    2: ["dp_shard=2", "tp=2", "cp=2", "pp=2", "dp_shard=2 ep=2"],
    4: ["dp_shard=2 tp=2", "cp=2 tp=2", "pp=2 tp=2", "dp_replicate=2 dp_shard=2", "dp_shard=2 tp=2 ep=2"],
}

recomputes = st.builds(
    Recompute,
    mode=st.sampled_from(["full", "selective", "activation"]),
    every=st.integers(1, 2),
    keep=st.sampled_from([("matmul", "attention", "collective"), ("matmul",), ("attention", "product"), ()]),
)
budgets = st.builds(mk.strategy.Budget, bytes=st.sampled_from([400_000, 10**7]), rows=st.just(2), seq_len=st.just(16))
offloads = st.builds(
    mk.strategy.ActivationOffload,
    to=st.sampled_from(["host", "disk"]),
    keep_last=st.integers(0, 2),
    min_bytes=st.sampled_from([1, 2000]),
    ahead=st.integers(0, 2),
)


@st.composite
def policies(draw: Any, mesh: str, schedule: str) -> mk.MemoryPolicy:
    """What `parallelize` takes on the mesh with sequence=True."""
    expert, splits_backward = "ep" in mesh, schedule == "zbv"
    recompute = draw(st.one_of(st.just("none"), recomputes, recomputes if expert else budgets))
    mode = getattr(recompute, "mode", recompute)
    in_parts = not expert and not splits_backward and mode in ("none", "full")
    return mk.MemoryPolicy(
        recompute=recompute,
        offload=draw(st.none() | offloads),
        regather=draw(st.booleans()),
        mlp_chunks=draw(st.sampled_from([1, 3])) if in_parts else 1,
        loss=draw(st.none() | st.builds(mk.strategy.ChunkedLoss, tokens=st.sampled_from([5, 1000]))),
        optimizer=draw(st.builds(OptimizerPolicy, offload=st.none() | st.builds(OptimizerOffload))),
    )


@st.composite
def cells(draw: Any, ranks: int) -> Cell:
    mesh = draw(st.sampled_from(MESHES[ranks]))
    schedule = draw(st.sampled_from(["1f1b", "zbv"])) if "pp" in mesh else "1f1b"
    return Cell(
        mesh=mesh,
        layers=4 if "pp" in mesh else 3,
        sequence=True,
        schedule=schedule,
        moe=WITH_EXPERTS if "ep" in mesh else None,
        memory=draw(policies(mesh, schedule)),
        microbatches=draw(st.integers(1, 3)),
        zero=draw(st.sampled_from([1, 2, 3])),
        tied=draw(st.booleans()),
        vocab=draw(st.sampled_from([64, 61])),
        documents=draw(st.booleans()),
    )


@pytest.mark.parametrize("ranks", [2, 4])
@draws(2)
@given(data=st.data())
def test_all_ways_together_equal_one_device(ranks: int, data: st.DataObject) -> None:
    cell = data.draw(cells(ranks))
    for outcome in pool(ranks).run(run_cell, cell):
        assert max(outcome.loss, outcome.norm, outcome.gradient, outcome.parameter) <= TOL_FP64, (outcome, cell)


# ----------------------------------------------------------------------- bits: what only moves or runs again changes none

MESH = Cell(mesh="dp_shard=2 tp=2", layers=2, sequence=True, microbatches=2, vocab=61)
NOTHING = mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss(tokens=5))
EVERYTHING = [
    replace(
        NOTHING,
        recompute=mode,  # type: ignore[arg-type]  # a literal
        offload=mk.strategy.ActivationOffload(to=to, keep_last=0, min_bytes=1),  # type: ignore[arg-type]  # same
        regather=True,
        optimizer=ON_HOST,
    )
    for mode, to in (("none", "host"), ("full", "disk"), ("selective", "host"), ("activation", "host"))
]


def trained(cell: Cell) -> list[Tensor]:
    """Gradients of two steps, and the parameters after them."""
    run = start(cell)
    optimizer = mk.adamw(run, lr=1e-2)
    seen = []
    for batch in batches(cell)[:2]:
        run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches)
        for param in run.parameters():
            grad = gradient_of(param)
            assert grad is not None
            seen.append(local_tensor(grad).clone())
        mk.clip_grad_norm(run, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return seen + [local_tensor(param).clone() for param in run.parameters()]


def changed(cell: Cell, memories: list[mk.MemoryPolicy]) -> list[int]:
    """How many tensors each policy changes."""
    expected = trained(cell)
    return [
        sum(not torch.equal(a, b) for a, b in zip(trained(replace(cell, memory=memory)), expected, strict=True))
        for memory in memories
    ]


def test_recompute_offload_and_regather_together_change_no_bit() -> None:
    for counts in pool(4).run(changed, replace(MESH, memory=NOTHING), EVERYTHING):
        assert counts == [0] * len(EVERYTHING)


# --------------------------------------------------------------------------------------------------- what was once wrong


def explained(cell: Cell) -> tuple[bool, str]:
    """(did the step send what is explained, what differs)"""
    seen, said = observe_step(cell)
    return seen == said, f"sent {seen - said}, explained {said - seen}"


@pytest.mark.parametrize("mesh", ["dp_shard=2", "cp=2", "pp=2"])
def test_regather_of_a_run_without_tp_is_explained(mesh: str) -> None:
    cell = Cell(mesh=mesh, layers=4, sequence=True, memory=mk.MemoryPolicy(regather=True))
    for same, difference in pool(2).run(explained, cell):
        assert same, difference


def test_the_head_of_a_chunked_loss_is_not_gathered_again() -> None:
    cell = Cell(
        mesh="tp=2", sequence=True, memory=mk.MemoryPolicy(regather=True, loss=mk.strategy.ChunkedLoss(tokens=7))
    )
    for same, difference in pool(2).run(explained, cell):
        assert same, difference


def test_counts_of_experts_are_not_sent_again_where_routers_do_not_run_again() -> None:
    memory = mk.MemoryPolicy(recompute="activation", regather=True)
    cell = Cell(mesh="dp_shard=2 tp=2", sequence=True, layers=3, microbatches=2, moe=Moe(shared=24, balance=0.1))
    for same, difference in pool(4).run(explained, replace(cell, memory=memory)):
        assert same, difference


def graphs(memory: mk.MemoryPolicy, layers: int) -> int:
    """Blocks that torch.compile traces in a step of so many alike."""
    cell = Cell(mesh="", layers=layers, compile="aot_eager", memory=memory)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing probes attributes that warn
        run = start(cell)
        run.forward_backward(batches(cell)[0])
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    ("memory", "kinds"),
    [
        (mk.MemoryPolicy(recompute="full"), 1),
        (mk.MemoryPolicy(recompute="selective"), 1),
        (
            mk.MemoryPolicy(recompute="activation", offload=mk.strategy.ActivationOffload(min_bytes=1)),
            2,
        ),  # the last stays
    ],
    ids=["full", "selective", "activation, offload"],
)
def test_blocks_that_are_treated_alike_are_compiled_once(memory: mk.MemoryPolicy, kinds: int) -> None:
    """torch.compile refuses to trace one function for a ninth class."""
    assert pool(1).run(graphs, memory, 10) == [kinds]


def with_low_limits() -> list[int]:
    """Layers with tp have hooks of their own, and each is traced; those of a second run too, by the same forward."""
    import torch._dynamo.config as config

    torch._dynamo.reset()
    limits = []
    with config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tracing probes attributes that warn
                run = start(Cell(mesh="tp=2", layers=3, compile="aot_eager"))
                run.forward_backward(batches(Cell(mesh=""))[0])
            limits.append(config.recompile_limit)
    return limits


def test_compile_takes_as_many_layers_as_there_are() -> None:
    for one, both in run_ranks(2, with_low_limits):
        assert (one, both) == (24, 48)


def refused(cell: Cell) -> str:
    try:
        start(cell)
    except mk.errors.PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("cell", "match"),
    [
        (
            # Two microbatches are held on the first rank and one on the second.
            Cell(
                mesh="pp=2",
                layers=4,
                memory=mk.MemoryPolicy(recompute=mk.strategy.Budget(bytes=144_000, rows=2, seq_len=16, microbatches=2)),
            ),
            "blocks of pp rank 0 keep",
        ),
        (
            Cell(mesh="pp=2", layers=2, schedule="gpipe", moe=Moe(), memory=mk.MemoryPolicy(recompute="activation")),
            "'layers.1', a DecoderLayer, has no feed-forward",
        ),
    ],
    ids=["budget", "activation"],
)
def test_what_one_stage_cannot_do_every_rank_refuses(cell: Cell, match: str) -> None:
    """Or the others would wait for it."""
    texts = pool(2).run(refused, cell)
    assert all(match in text for text in texts), texts


def test_what_ranks_refuse_is_refused_before_there_are_ranks() -> None:
    cell = Cell(mesh="", layers=2, moe=Moe())
    with pytest.raises(mk.errors.PlanError, match="'layers.1', a DecoderLayer, has no feed-forward"):
        mk.explain(
            build(cell),
            mk.MeshSpec(pp=2),
            plan=plan_of(cell),
            memory=mk.MemoryPolicy(recompute="activation"),
            rows=2,
            seq_len=8,
        )
