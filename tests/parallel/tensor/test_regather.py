"""Inputs of tensor-parallel regions, kept sharded: the bytes of the closed form, the same gradients, and what is sent."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

import meshkit as mk
from meshkit.models.llama import LLAMA_PLAN
from meshkit.preflight.explain import Message
from meshkit.strategy import Recompute
from tests.compare_shards import difference
from tests.depth import thin
from tests.laws.parity.cases import Cell, Moe, batches, mesh_for, own_rows, reference, run_cell, start
from tests.laws.parity.test_bytes import observe_step
from tests.memory.live import held_bytes
from tests.world import pool

TOL_FP64 = 1e-10
REGATHER = mk.MemoryPolicy(regather=True)
HEADS, KV_HEADS, HEAD_DIM, FFN, ROWS, TOKENS = 32, 8, 4, 448, 2, 32
HIDDEN = HEADS * HEAD_DIM  # Llama-3-8B's ratios: g = 1/4, F = 7/2


def a_layer(mesh: str, mode: str, regather: bool) -> Fraction:
    """Elements of fp32 that backward holds of one layer, over B x T x C: of models that differ by a layer."""
    held = []
    for layers in (1, 2):
        config = mk.models.LlamaConfig(
            vocab_size=32,
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
        )
        torch.manual_seed(0)
        model = mk.models.Llama(config)
        tensor = mesh_for(mesh)["tp"]
        mk.tensor_parallel(model, tensor, plan=LLAMA_PLAN.tensor, sequence=True, regather=regather)
        mk.recompute(model, blocks=[f"layers.{layer}" for layer in range(layers)], mode=mode)
        held.append(held_bytes(model, ROWS, TOKENS))
    return Fraction(held[1] - held[0], 4 * ROWS * TOKENS * HIDDEN)


def layers_of(mesh: str) -> tuple[Fraction, ...]:
    return tuple(a_layer(mesh, mode, regather) for mode in ("none", "selective") for regather in (False, True))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_what_a_layer_keeps_follows_the_closed_form(tp: int) -> None:
    """Of B x T x C elements: two inputs, two norms' outputs, q, k, v, the attention's output, gate, up, silu and product.

    Norms on a CPU are written out: each keeps its normalised input (1) and one scale a token (1/C). Attention keeps one
    number a head and token (H/C).
    """
    g, ffn = Fraction(KV_HEADS, HEADS), Fraction(FFN, HIDDEN)
    inputs, heads = Fraction(2), 2 + 2 * g + 4 * ffn + Fraction(HEADS, HIDDEN)
    regions = Fraction(2)  # what the two norms hand to attention and feed-forward
    norms = 2 + Fraction(2, HIDDEN)
    for plain, again, selective, selective_again in pool(tp).run(layers_of, f"tp={tp}"):
        assert plain == regions + (inputs + norms + heads) / tp
        assert again == (regions + inputs + norms + heads) / tp
        assert selective - selective_again == regions


# ------------------------------------------------------------------------------------------------ the same step

CELLS = [
    (2, Cell(mesh="tp=2", sequence=True, memory=REGATHER, qwen=True, vocab=61)),
    (4, Cell(mesh="dp_shard=2 tp=2", sequence=True, microbatches=2, memory=REGATHER, tied=True)),
    (
        4,
        Cell(mesh="tp=4", sequence=True, layers=3, memory=replace(REGATHER, recompute=Recompute(mode="full", every=2))),
    ),
    (4, Cell(mesh="tp=4", sequence=True, layers=3, memory=replace(REGATHER, recompute="selective"), hidden_mlp=45)),
    (4, Cell(mesh="cp=2 tp=2", sequence=True, memory=REGATHER, documents=True, heads=(9, 3))),
    (4, Cell(mesh="pp=2 tp=2", sequence=True, layers=4, microbatches=3, memory=REGATHER, schedule="zb-h1")),
    (4, Cell(mesh="dp_shard=2 tp=2 ep=2", sequence=True, layers=3, memory=REGATHER, moe=Moe(experts=8, shared=24))),
]


@pytest.mark.parametrize(("ranks", "cell"), thin(CELLS, 2), ids=str)
def test_gradients_equal_one_device(ranks: int, cell: Cell) -> None:
    for outcome in pool(ranks).run(run_cell, cell):
        assert max(outcome.loss, outcome.norm, outcome.gradient, outcome.parameter) <= TOL_FP64, outcome


@pytest.mark.parametrize(("ranks", "cell"), CELLS[:-1], ids=str)
def test_what_is_gathered_again_is_explained(ranks: int, cell: Cell) -> None:
    for seen, said in pool(ranks).run(observe_step, cell):
        assert seen == said


def gathers(cell: Cell) -> tuple[Counter[Message], list[torch.Tensor | None]]:
    run = start(cell)
    with mk.observe(run.mesh) as seen:
        run.forward_backward(own_rows(batches(cell)[0], run.mesh))
    return seen, [param.grad.to_local().clone() for param in run.parameters() if param.grad is not None]


def extra_gathers() -> tuple[Counter[Message], Counter[Message], bool]:
    plain = Cell(mesh="tp=2", sequence=True)
    (before, expected), (after, found) = gathers(plain), gathers(replace(plain, memory=REGATHER))
    same = all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    return after - before, before - after, same


def test_each_region_is_gathered_once_more_and_gradients_are_the_same_bits() -> None:
    for more, less, same in pool(2).run(extra_gathers):
        assert sum(more.values()) == 5  # attention and feed-forward of two layers, and the head
        assert {(message.axis, message.op) for message in more} == {("tp", "all_gather")}
        assert not less
        assert same


# ----------------------------------------------------------------------------------------------------- compiled


def compiled_gathers(mode: str) -> tuple[int, float]:
    """(inputs of regions gathered in a step that compiles nothing, largest error of its gradients)."""
    cell = Cell(mesh="tp=2", layers=1, sequence=True, compile="aot_eager", memory=replace(REGATHER, recompute=mode))
    batch = batches(cell)[0]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing probes attributes that warn
        run = start(cell)
        run.forward_backward(own_rows(batch, run.mesh))
        for param in run.parameters():
            param.grad = None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run.forward_backward(own_rows(batch, run.mesh))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    gradients = reference(cell)[2]
    error = max(difference(p.grad, gradients[name]) for name, p in run.named_parameters())
    return sum(event.name == "meshkit::gather_region" for event in profile.events()), error


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_compiled_blocks_gather_again(mode: str) -> None:
    for gathered, error in pool(2).run(compiled_gathers, mode, timeout_s=240):
        assert error <= TOL_FP64
        assert gathered == 6  # two regions of the layer, and the head: forward and backward


# ------------------------------------------------------------------------------------------------------ refusals


def test_it_needs_the_sequence_split_on_any_mesh() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(mk.errors.PlanError, match="regather=True keeps the sharded inputs of regions"):
        mk.explain(model, mk.MeshSpec(), plan=mk.plan.auto_plan(model), rows=1, seq_len=4, memory=REGATHER)
