"""Law 7 for latent attention, whose keys and values are made of one latent: what it sends on cp, of which heads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

import meshkit as mk
from meshkit.models import DeepseekV3Config, build_model, moe_plan
from meshkit.parallel.tensor.heads import widest_heads
from meshkit.preflight.explain import Message
from tests.depth import thin
from tests.laws.parity.cases import Cell, batches, mesh_for, own_rows
from tests.laws.parity.test_bytes import assert_alike, seen_and_said
from tests.world import pool

CONFIG = DeepseekV3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=6,
    moe_intermediate_size=12,
    n_routed_experts=4,
    num_experts_per_tok=2,
    kv_lora_rank=10,
    q_lora_rank=7,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=6,  # smaller than the 8 of q and k, to which it is padded on its way
    first_k_dense_replace=2,  # what routed experts send depends on the tokens
)


@dataclass(frozen=True, kw_only=True)
class Latent:
    mesh: str
    context: str
    compressed: bool = True
    sequence: bool = False
    recompute: str = "none"
    documents: bool = False
    bf16: bool = False


CELLS = [
    Latent(mesh="cp=2", context="ring"),
    Latent(mesh="cp=2", context="all_gather", recompute="full", compressed=False),
    Latent(mesh="cp=2", context="ulysses", bf16=True),
    Latent(mesh="cp=2 tp=2", context="auto", documents=True),
    Latent(mesh="cp=2 tp=2", context="ulysses", sequence=True, recompute="selective"),
]


def build(cell: Latent) -> tuple[torch.nn.Module, mk.Plan]:
    config = CONFIG if cell.compressed else replace(CONFIG, q_lora_rank=None)
    torch.manual_seed(3)
    return build_model(config), moe_plan(config)


def observe_latent(cell: Latent) -> tuple[Counter[Message], Counter[Message]]:
    model, plan = build(cell)
    run = mk.parallelize(
        model,
        mesh_for(cell.mesh),
        plan=plan,
        memory=mk.MemoryPolicy(recompute=cell.recompute, precision=mk.strategy.Precision() if cell.bf16 else None),  # type: ignore[arg-type]
        sequence=cell.sequence,
        context=mk.strategy.ContextPolicy(scheme=cell.context),  # type: ignore[arg-type]
    )
    local = own_rows(batches(Cell(mesh=cell.mesh, documents=cell.documents))[0], run.mesh)
    masks = [mk.Mask.from_positions(row.unsqueeze(0)) for row in local["position_ids"]] if cell.documents else None
    return seen_and_said(run, local, microbatches=2, said_of=masks)


@pytest.mark.parametrize("cell", thin(CELLS, 2), ids=str)
def test_latent_attention_sends_what_is_explained(cell: Latent) -> None:
    assert_alike(pool(mk.MeshSpec.parse(cell.mesh).world_size).run(observe_latent, cell))


@pytest.mark.parametrize("compressed", [True, False])
def test_heads_of_latent_attention_are_those_of_one_tensor_rank(compressed: bool) -> None:
    model, plan = build(Latent(mesh="", context="auto", compressed=compressed))
    assert [widest_heads(model, plan.tensor, size=size) for size in (1, 2, 3)] == [(6, 6, 8), (3, 3, 8), (2, 2, 8)]


@pytest.mark.parametrize(
    ("styles", "message"),
    [
        (
            {"self_attn": mk.plan.enter(query="q_proj")},
            "names the child that makes the queries, but there is no module",
        ),
        (
            {"self_attn": mk.plan.enter(query="kv_a_proj_with_mqa")},
            "but '.*kv_a_proj_with_mqa' is per_head\\(\\) in the plan",
        ),
        (
            {"self_attn.q_b_proj": mk.plan.column()},
            "'.*q_b_proj' is column\\(\\) in the plan. Name a child that is column\\(group=",
        ),
    ],
)
def test_latent_attention_without_the_heads_of_its_queries_is_refused(
    styles: dict[str, mk.Style], message: str
) -> None:
    model, plan = build(Latent(mesh="", context="auto"))
    tensor = {**plan.tensor, **{f"layers.*.{name}": style for name, style in styles.items()}}
    with pytest.raises(mk.errors.PlanError, match=message):
        mk.explain(model, mk.MeshSpec(cp=2), plan=replace(plan, tensor=tensor), rows=1, seq_len=16)
