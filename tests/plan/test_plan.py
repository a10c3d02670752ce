from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import meshkit as mk
from meshkit.parallel.tensor.layout import tensor_layout
from meshkit.plan import Style, match_names, match_table
from meshkit.plan.match import match_blocks
from tests.tiny import tiny_config


class MLP(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(3))
        self.norm = nn.LayerNorm(8)


NAMES = [name for name, _ in Stack().named_modules()]


def test_a_container_without_a_forward_stands_for_the_modules_in_it() -> None:
    nested = nn.ModuleList(
        [
            nn.ModuleList([MLP(), nn.ModuleDict({"one": MLP(), "two": nn.Sequential(MLP())})]),
            nn.Sequential(MLP(), MLP()),
            nn.ModuleList([MLP()]),
        ]
    )
    modules = dict(nn.ModuleDict({"layers": nested, "norm": nn.LayerNorm(8)}).named_modules())
    assert match_blocks(["layers.*", "norm"], modules) == [
        "layers.0.0",
        "layers.0.1.one",
        "layers.0.1.two",
        "layers.1",
        "layers.2.0",
        "norm",
    ]


def test_a_star_is_one_component_and_braces_are_a_choice() -> None:
    assert match_names(["layers.*"], NAMES, what="module") == ["layers.0", "layers.1", "layers.2"]
    assert match_names(["layers.1.{up,down}"], NAMES, what="module") == ["layers.1.up", "layers.1.down"]
    assert match_names(["**.up"], NAMES, what="module") == ["layers.0.up", "layers.1.up", "layers.2.up"]


def test_an_optional_style_may_match_nothing() -> None:
    assert match_table({"q_norm": mk.plan.per_head(optional=True)}, NAMES, what="module") == {}


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"layers.*.upp": mk.plan.column()}, r"'layers.\*.upp' matches no module. The nearest is 'layers.\*.up'"),
        ({"layers.*.up": mk.plan.column(), "layers.0.*": mk.plan.row()}, "two patterns match the module 'layers.0.up'"),
    ],
)
def test_typos_and_overlaps_are_refused(table: dict[str, Style], match: str) -> None:
    with pytest.raises(mk.errors.PlanError, match=match):
        match_table(table, NAMES, what="module")


PLAN = {"layers.*.up": mk.plan.column(), "layers.*.down": mk.plan.row(), "norm": mk.plan.sequence()}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"norm": None}, "module 'norm' \\(LayerNorm\\) holds the parameter 'weight', but no pattern"),
        ({"norm": mk.plan.column()}, "column\\(\\) on 'norm' needs an nn.Linear, but it is a LayerNorm"),
        ({"norm": mk.plan.vocab()}, "vocab\\(\\) on 'norm' needs an nn.Linear or nn.Embedding"),
        (
            {"layers": mk.plan.enter(), "layers.*.up": mk.plan.row()},
            "enters the axis for its column\\(\\) children, but has none",
        ),
        ({"layers.*": mk.plan.attention()}, "needs the size of a head in its attribute 'head_dim'"),
        (
            {"norm": mk.plan.enter()},
            "enter\\(\\) on 'norm' enters the axis for its column\\(\\) children, but has none",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(change: dict[str, Style | None], match: str) -> None:
    plan = {pattern: style for pattern, style in {**PLAN, **change}.items() if style is not None}
    with pytest.raises(mk.errors.PlanError, match=match):
        tensor_layout(Stack(), plan, size=2, sequence=False)


def test_a_tied_parameter_needs_one_layout() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    with pytest.raises(mk.errors.PlanError, match="'b.weight' and 'a.weight' are one tied parameter"):
        tensor_layout(model, {"a": mk.plan.column(), "b": mk.plan.row()}, size=2, sequence=False)


def test_more_ranks_than_query_heads_are_refused() -> None:
    model = mk.models.Llama(tiny_config(num_attention_heads=2))
    with pytest.raises(mk.errors.PlanError, match="tp=4 needs at least 4 query heads, but 'layers.0.self_attn' has 2"):
        tensor_layout(model, mk.models.LLAMA_PLAN.tensor, size=4, sequence=False)


def test_auto_plan_pairs_the_linear_layers_of_an_mlp() -> None:
    assert mk.plan.auto_plan(MLP()).tensor == {"up": mk.plan.column(), "down": mk.plan.row()}
    sequential = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    assert mk.plan.auto_plan(sequential).tensor == {
        "0": mk.plan.column(),
        "2": mk.plan.row(),
        "3": mk.plan.replicate(),
        "4": mk.plan.replicate(),
    }


def test_auto_plan_finds_the_blocks_and_says_what_it_decided() -> None:
    plan = mk.plan.auto_plan(Stack())
    assert plan.blocks == ("layers.*",)
    assert "layers.*.up" in str(plan)
    assert "column()" in str(plan)


def test_auto_plan_takes_layers_for_blocks_however_many_experts_each_has() -> None:
    with torch.device("meta"):
        model = mk.models.Llama(mk.models.LLAMA32_1B)
    layers = len(model.layers)
    for layer in model.layers:
        layer.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers + 1))
    plan = mk.plan.auto_plan(model)
    assert plan.blocks == ("layers.*",)
    assert plan.tensor["layers.0"] == mk.plan.split()


def test_auto_plan_takes_layers_of_several_kinds_for_blocks() -> None:
    model = Stack()
    model.layers[1] = nn.Sequential(nn.ModuleList(nn.Linear(8, 8) for _ in range(7)))  # longer, but inside of a layer
    model.register_module("unused", nn.ModuleList())
    assert mk.plan.auto_plan(model).blocks == ("layers.*",)


def test_auto_plan_takes_for_blocks_what_the_model_declares_to_be_its_layers() -> None:
    model = Stack()
    model.layers[1] = nn.Linear(8, 8)  # of two types
    model.register_module("others", nn.ModuleList(MLP() for _ in range(5)))
    assert mk.plan.auto_plan(model).blocks == ("others.*",)
    model.config = SimpleNamespace(base_model_pp_plan={"norm": (), "layers": (["x"], ["x"])})
    assert mk.plan.auto_plan(model).blocks == ("layers.*",)


def test_auto_plan_of_our_llama_is_the_written_one_but_for_the_split() -> None:
    config = mk.models.LLAMA32_1B
    with torch.device("meta"):
        model = mk.models.Llama(config)
    derived = tensor_layout(model, mk.plan.auto_plan(model).tensor, size=4, sequence=True)
    written = tensor_layout(model, mk.models.LLAMA_PLAN.tensor, size=4, sequence=True)
    assert derived.params == written.params


def test_auto_plan_refuses_a_model_without_parameters() -> None:
    with pytest.raises(mk.errors.PlanError, match="ReLU has no parameters"):
        mk.plan.auto_plan(nn.ReLU())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: mk.MemoryPolicy(recompute="some"), "recompute='some'\\): choose one of 'none', 'full', 'selective'"),
        (lambda: mk.strategy.Precision(compute=torch.int8), "is not a floating-point dtype"),
        (lambda: mk.strategy.Precision(compute="bf16"), "is not a floating-point dtype"),
    ],
)
def test_memory_policies_that_mean_nothing_are_refused(make, match: str) -> None:
    with pytest.raises(mk.errors.PlanError, match=match):
        make()
