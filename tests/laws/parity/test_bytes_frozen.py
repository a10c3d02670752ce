"""Law 7 for models of which a part is frozen: backward sends only where gradients flow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

import meshkit as mk
from meshkit.models.llama import LLAMA_PLAN
from meshkit.preflight.explain import Message
from tests.depth import thin
from tests.laws.parity.cases import Cell, batches, build, mesh_for, own_rows
from tests.laws.parity.test_bytes import assert_alike, seen_and_said
from tests.world import pool

ALL = None
LAST = ("layers.1.**_proj",)  # the first block is frozen, so that none of it runs again either
MLPS = ("layers.*.mlp.*_proj",)  # the first attention has nothing to learn
OUTPUTS = ("layers.*.self_attn.o_proj",)  # the first attention has no gradients, but its output has
QUERIES = ("layers.*.self_attn.q_proj",)
CHUNKED = mk.strategy.ChunkedLoss(tokens=5)


@dataclass(frozen=True, kw_only=True)
class Frozen:
    mesh: str
    targets: tuple[str, ...] | None = ALL
    saved: tuple[str, ...] = ()
    sequence: bool = False
    zero: int | None = None
    microbatches: int = 1
    layers: int = 2
    schedule: str = "1f1b"
    context: str = "auto"
    memory: mk.MemoryPolicy = mk.MemoryPolicy()  # noqa: RUF009  # frozen


FULL, SELECTIVE = mk.MemoryPolicy(recompute="full"), mk.MemoryPolicy(recompute="selective")
CELLS = [
    Frozen(mesh="tp=2", microbatches=3, memory=mk.MemoryPolicy(loss=CHUNKED)),
    Frozen(mesh="tp=2", memory=FULL),
    Frozen(mesh="tp=2", sequence=True, microbatches=2, memory=SELECTIVE),
    Frozen(mesh="tp=2", sequence=True, memory=mk.MemoryPolicy(regather=True, recompute="selective")),
    Frozen(mesh="tp=2", sequence=True, memory=mk.MemoryPolicy(regather=True, loss=CHUNKED)),
    Frozen(mesh="tp=2", sequence=True, targets=LAST, memory=mk.MemoryPolicy(regather=True)),
    Frozen(mesh="tp=2", sequence=True, targets=LAST, memory=mk.MemoryPolicy(regather=True, recompute="selective")),
    Frozen(mesh="tp=2", targets=LAST, memory=mk.MemoryPolicy(mlp_chunks=3, recompute="full")),
    Frozen(mesh="tp=2", sequence=True, targets=MLPS, memory=FULL),
    Frozen(mesh="tp=2", sequence=True, targets=QUERIES, saved=("lm_head", "norm")),
    Frozen(mesh="tp=2", sequence=True, targets=OUTPUTS, saved=("layers.*.*_layernorm",)),
    Frozen(mesh="tp=2", targets=MLPS, saved=("embed_tokens",)),
    Frozen(mesh="dp_shard=2", microbatches=3),
    Frozen(mesh="dp_shard=2", microbatches=2, targets=LAST, memory=FULL),
    Frozen(mesh="dp_shard=2", microbatches=2, targets=LAST, zero=1),
    Frozen(mesh="cp=2", targets=LAST, context="ring", memory=FULL),
    Frozen(mesh="cp=2", targets=MLPS, context="ulysses"),
    Frozen(mesh="cp=2", targets=OUTPUTS, context="all_gather"),
    Frozen(mesh="cp=2", targets=QUERIES, context="group_cast"),
    Frozen(mesh="pp=2 tp=2", layers=4, microbatches=2, schedule="zbv"),
]


def observe_frozen(cell: Frozen) -> tuple[Counter[Message], Counter[Message]]:
    model = build(Cell(mesh=cell.mesh, layers=cell.layers))
    plan = mk.lora.attach(model, LLAMA_PLAN, rank=3, targets=cell.targets, modules_to_save=cell.saved)
    run = mk.parallelize(
        model,
        mesh_for(cell.mesh),
        plan=plan,
        memory=cell.memory,
        zero=cell.zero,
        sequence=cell.sequence,
        context=mk.strategy.ContextPolicy(scheme=cell.context),  # type: ignore[arg-type]
        pipeline=mk.strategy.PipelinePolicy(schedule=cell.schedule),
    )
    local = own_rows(batches(Cell(mesh=cell.mesh))[0], run.mesh)
    return seen_and_said(run, local, microbatches=cell.microbatches)


@pytest.mark.parametrize("cell", thin(CELLS, 2), ids=str)
def test_what_is_frozen_sends_in_backward_what_is_explained(cell: Frozen) -> None:
    assert_alike(pool(mk.MeshSpec.parse(cell.mesh).world_size).run(observe_frozen, cell))


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_model_of_which_nothing_trains_is_explained_without_backward(axis: str) -> None:
    model = build(Cell(mesh="")).requires_grad_(False)
    said = mk.explain(model, mk.MeshSpec.parse(f"{axis}=2"), plan=LLAMA_PLAN, rows=2, seq_len=16)
    whys = [why for reasons in said.reasons.values() for why in reasons]
    assert whys
    assert not [why for why in whys if "backward" in why or "gradients" in why]
