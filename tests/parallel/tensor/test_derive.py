"""Derived plans: of small modules, which candidate the proof takes, and that a wrong one is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import meshkit as mk
from meshkit.mesh import MeshSpec
from meshkit.parallel.tensor.derive import share_of
from meshkit.parallel.tensor.layout import tensor_layout
from meshkit.parallel.tensor.proof import prove_layout
from meshkit.plan import Plan, Style, column, enter, replicate, row, sequence, vocab
from meshkit.program import Example, Unproved, read_program
from meshkit.resolve import resolve
from meshkit.strategy import Strategy
from tests.parallel.tensor.parts import VOCABULARY, WIDTH, Attention, Gated, Model, Normed, Relative, Spread
from tests.zoo import causal


def derived(model: nn.Module, *, sequence: bool = False) -> Plan:
    strategy = Strategy(sequence=sequence)
    return resolve(read_program(model), strategy, MeshSpec(tp=2)).plan


def prove(model: nn.Module, plan: dict[str, Style], *, split: bool = False) -> None:
    layout = tensor_layout(model, plan, size=2, sequence=split)
    prove_layout(read_program(model), layout, Example((torch.zeros(2, 8, dtype=torch.int64),)))


AROUND = {"embed_tokens": vocab(), "layers.0.norm": sequence(), "lm_head": vocab()}


def test_fused_heads_and_features_are_columns_by_parts() -> None:
    plan = derived(Model(Attention, Attention)).tensor
    assert plan["layers.*.part.qkv"] == column(parts=(16, 16, 16))
    assert plan["layers.*.part"] == enter(local=("num_heads",), split=("sharpness",))
    assert plan["layers.*.part.out"] == row()
    assert derived(Model(Gated)).tensor["layers.*.part.both"] == column(parts=(24, 24))


def test_layers_that_differ_have_plans_of_their_own() -> None:
    plan = derived(Model(Gated, Normed)).tensor
    assert plan["layers.0.part.down"] == row()
    assert plan["layers.1.part"] == replicate()
    assert plan["layers.*.part.up"] == plan["layers.1.part.down"] == column(gather=True)


def test_columns_and_their_row_may_stand_in_different_modules() -> None:
    plan = derived(Model(Spread)).tensor
    assert plan["layers.*.part.first.0"] == column()
    assert plan["layers.*.part.second.dense"] == row()
    assert plan["layers.*.part.second.norm"] == sequence()


def test_a_table_of_numbers_for_heads_is_split_by_them() -> None:
    plan = derived(Model(Relative)).tensor
    assert plan["layers.*.part.distances"] == plan["layers.*.part.k"] == column()
    assert plan["layers.*.part"] == enter(local=("num_heads",))


def test_layers_that_stand_in_the_block_itself_are_split() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.one, self.two, self.alone = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.alone(self.last(x + self.two(self.one(self.norm(x)).relu()))).tanh()

    model = Model()
    model.layers.append(Flat())
    plan = derived(model).tensor
    assert plan["layers.*.one"] == column()
    assert plan["layers.*.two"] == row()


def test_a_bias_that_a_head_keeps_for_its_layer_is_split_with_it() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(VOCABULARY))
            self.decoder = nn.Linear(WIDTH, VOCABULARY)
            self.decoder.bias = self.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(x)

    model = Model(Gated)
    model.lm_head = Head()
    plan = derived(model).tensor
    assert plan["lm_head.decoder"].kind == "column"
    assert plan["lm_head"].columns == ("bias",)


def test_a_plan_says_what_share_it_splits_and_why_not_more() -> None:
    text = str(derived(Model(Normed)))
    assert "tp=2 splits" in text
    assert "layers.0.part is not split otherwise" in text
    assert "% by column(gather=True), whose outputs every rank has whole" in text


@pytest.mark.parametrize("split", (False, True))
def test_parts_are_proved_and_a_column_across_them_is_not(split: bool) -> None:
    model, out = Model(Gated), {"layers.0.part.down": row()}
    prove(model, {**AROUND, "layers.0.part": enter(), "layers.0.part.both": column(parts=(24, 24)), **out}, split=split)
    prove(model, {**AROUND, "layers.0.part.both": column(parts=(24, 24)), **out}, split=split)
    with pytest.raises(Unproved):
        prove(model, {**AROUND, "layers.0.part.both": column(), **out}, split=split)
    with pytest.raises(Unproved):
        prove(model, {**AROUND, "layers.0.part.both": column(parts=(16, 32)), **out}, split=split)


@pytest.mark.parametrize("split", (False, True))
def test_a_container_that_is_whole_is_proved_with_all_in_it(split: bool) -> None:
    inside = {"layers.0.part": replicate(), "layers.0.part.norm": replicate()}
    joined = {"layers.0.part.up": column(gather=True), "layers.0.part.down": column(gather=True)}
    prove(Model(Normed), {**AROUND, **inside, **joined}, split=split)
    with pytest.raises(Unproved):
        prove(Model(Normed), {**AROUND, **inside, **joined, "layers.0.part.up": column()}, split=split)


def test_a_joined_layer_by_itself_is_proved() -> None:
    styles = {"layers.0.part.up": column(gather=True), "layers.0.part.down": column(gather=True)}
    for split in (False, True):
        prove(Model(Normed), {**AROUND, "layers.0.part.norm": sequence(), **styles}, split=split)


def test_numbers_and_parameters_of_heads_must_be_those_of_a_rank() -> None:
    columns = {"layers.0.part.qkv": column(parts=(16, 16, 16)), "layers.0.part.out": row()}
    right = enter(local=("num_heads",), split=("sharpness",))
    prove(Model(Attention), {**AROUND, "layers.0.part": right, **columns})
    for wrong in (enter(split=("sharpness",)), enter(local=("num_heads",)), enter()):
        with pytest.raises(Unproved):
            prove(Model(Attention), {**AROUND, "layers.0.part": wrong, **columns})


@pytest.mark.parametrize(
    ("style", "match"),
    [
        (enter(local=("heads",)), r"enter\(local=...\) on 'layers.0.part': heads is None"),
        (enter(split=("sharp",)), "splits its parameter 'sharp', but it holds"),
    ],
)
def test_what_a_container_has_not_is_refused(style: Style, match: str) -> None:
    columns = {"layers.0.part.qkv": column(), "layers.0.part.out": row()}
    with pytest.raises(mk.errors.PlanError, match=match):
        tensor_layout(Model(Attention), {**AROUND, "layers.0.part": style, **columns}, size=2, sequence=False)


@pytest.mark.parametrize(
    ("style", "match"),
    [
        (column(gather=True), "tp=5 does not divide its 48 features"),
        (column(parts=(24, 23)), "parts are all of them"),
    ],
)
def test_features_that_the_axis_does_not_divide_are_refused(style: Style, match: str) -> None:
    plan = {**AROUND, "layers.0.part.both": style, "layers.0.part.down": row()}
    with pytest.raises(mk.errors.PlanError, match=match):
        tensor_layout(Model(Gated), plan, size=5, sequence=False)


def test_a_layer_whose_weight_others_read_is_whole() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.up.weight * 2)

    assert derived(Model(Reads)).tensor["layers.*.part.up"] == replicate(outside=True)


@pytest.mark.parametrize("split", (False, True))
def test_adapters_of_joined_and_parted_layers_are_proved(split: bool) -> None:
    for part in (Gated, Normed, Attention):
        model = Model(part)
        plan = derived(model, sequence=split)
        prove(model, dict(mk.lora.attach(model, plan, rank=2, seed=0).tensor), split=split)


def test_gpt2s_own_linear_layers_are_split() -> None:
    program = read_program(causal.build("gpt2"))
    resolved = resolve(program, Strategy(), MeshSpec(tp=2))
    plan = resolved.plan.tensor
    assert plan["transformer.h.*.attn.c_attn"] == column(parts=(32, 32, 32))
    assert plan["transformer.h.*.mlp.c_fc"] == column()
    assert plan["transformer.h.*.attn.c_proj"] == plan["transformer.h.*.mlp.c_proj"] == row()
    assert resolved.layout is not None
    # They keep their weights [in, out].
    assert resolved.layout.params["transformer.h.0.mlp.c_fc.weight"].placement == Shard(1)
    assert resolved.layout.params["transformer.h.0.mlp.c_proj.weight"].placement == Shard(0)
    assert share_of(program, resolved.layout) > 0.98


def test_a_vocabulary_of_such_a_layer_is_refused() -> None:
    part = nn.ModuleDict({"head": causal.build("gpt2").transformer.h[0].mlp.c_fc})  # type: ignore[union-attr,index,dict-item]
    with pytest.raises(mk.errors.PlanError, match=r"vocab\(\) on 'head' needs an nn.Linear"):
        tensor_layout(part, {"head": vocab()}, size=2, sequence=False)
