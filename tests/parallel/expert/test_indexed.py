"""Stacked experts of transformers (its experts interface) on ep and etp: each module alone, against itself on one device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.parallel.expert import hot_experts_of
from meshkit.parallel.expert._stacks import packed_rows
from meshkit.plan import experts
from meshkit.plan.auto import auto_plan
from meshkit.plan.declared_experts import declared_experts
from meshkit.strategy import Capacity, ExpertPolicy
from tests.compare_shards import difference
from tests.laws.parity.cases import mesh_for
from tests.world import pool

TOL_FP64, TOL_FP32 = 1e-10, 1e-4  # only the order of summation differs, of numbers up to 50
WIDTH, FEATURES, EXPERTS, CHOSEN = 8, 11, 5, 2  # neither ranks of ep nor of etp share them evenly
CONFIG: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": FEATURES,
    "moe_intermediate_size": FEATURES,
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "moe_latent_size": None,
    "hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "swiglu_alpha": 1.7,
    "swiglu_limit": 0.5,
}
# halves; pairs, transposed, with biases; transposed halves; no gate; a gate of its own; indices of no expert
KINDS = [
    ("mixtral", "MixtralExperts"),
    ("gpt_oss", "GptOssExperts"),
    ("aria", "AriaExperts"),
    ("nemotron_h", "NemotronHExperts"),
    ("deepseek_v4", "DeepseekV4Experts"),
    ("zaya", "ZayaExperts"),
]
IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]


def module_of(kind: tuple[str, str], implementation: str = "eager") -> nn.Module:
    import importlib

    made = getattr(importlib.import_module(f"transformers.models.{kind[0]}.modeling_{kind[0]}"), kind[1])
    sizes = {"moe_intermediate_size": 16, "intermediate_size": 16} if implementation == "grouped_mm" else {}  # aligned
    config = SimpleNamespace(**{**CONFIG, **sizes}, _experts_implementation=implementation)
    module: nn.Module = made(config).double()
    generator = torch.Generator().manual_seed(3)
    for param in module.parameters():
        nn.init.normal_(param, std=0.6, generator=generator)
    return module


def tokens(rank: int, routing: str, kind: tuple[str, str]) -> tuple[Tensor, Tensor, Tensor]:
    """Different on every rank, in number too. routing: "one": all choose the first expert, so that ranks have no row."""
    generator = torch.Generator().manual_seed(10 + rank)
    count = 0 if routing == "no tokens on a rank" and rank == 0 else 3 + 2 * rank
    x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    weights = torch.rand(count, CHOSEN, generator=generator, dtype=torch.float64)
    index = torch.rand(count, EXPERTS, generator=generator).argsort(-1)[:, :CHOSEN]
    if routing == "one":
        index = torch.zeros_like(index)
    if kind[0] == "zaya":  # its router says of some tokens that no expert is theirs
        index[::2, 0] = EXPERTS
    return x, index, weights


def judge(mesh_text: str, kind: tuple[str, str], routing: str, implementation: str, copies: int) -> float:
    """The largest error of this rank's outputs, and of all gradients."""
    mesh = mesh_for(mesh_text)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    plain, module = module_of(kind, implementation), module_of(kind, implementation)
    plain.config._experts_implementation = "eager"
    dtype = torch.float32 if implementation == "grouped_mm" else torch.float64  # it knows no fp64
    plain, module = plain.to(dtype), module.to(dtype)
    style = declared_experts(module)
    assert style is not None
    policy = ExpertPolicy(copies=copies, target=1.0) if copies else None
    mk.expert_parallel(module, mesh["ep", "etp"], plan={"": style}, policy=policy)
    worst = 0.0
    for step in range(2 if copies else 1):  # copies are made of what was busy in the step before
        if copies and step:
            found = hot_experts_of(module)
            assert found is not None
            found.note([2**expert for expert in range(EXPERTS)])
            assert found.placement.copies_made
        inputs = [
            (x.to(dtype), index, weights.to(dtype))
            for x, index, weights in (tokens(other, routing, kind) for other in range(ranks))
        ]
        expected = []
        for x, index, weights in inputs:
            expected.append(plain(x.requires_grad_(), index, weights.requires_grad_()))
        sum((out.cos().sum() for out in expected), torch.zeros(())).backward()
        x, index, weights = (tensor.detach().clone() for tensor in inputs[rank])
        out = module(x.requires_grad_(), index, weights.requires_grad_())
        out.cos().sum().backward()
        pairs = [(out, expected[rank]), (x.grad, inputs[rank][0].grad), (weights.grad, inputs[rank][2].grad)]
        pairs += [(param.grad, plain.get_parameter(name).grad) for name, param in module.named_parameters()]
        for value, wanted in pairs:
            wanted = torch.zeros_like(value) if wanted is None else wanted
            worst = max(worst, difference(value, wanted))
        plain.zero_grad()
        module.zero_grad()
    return worst


@pytest.mark.parametrize("mesh", ["dp_shard=2 ep=2", "dp_shard=2 etp=2", "dp_shard=4 ep=2 etp=2", "dp_shard=4 etp=4"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1])
def test_experts_on_ranks_equal_one_device(mesh: str, kind: tuple[str, str]) -> None:
    for routing in ("even", "one", "no tokens on a rank"):
        found = pool(mk.MeshSpec.parse(mesh).world_size).run(judge, mesh, kind, routing, "eager", 0)
        assert max(found) <= TOL_FP64, (routing, found)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("mesh", ["dp_shard=2 ep=2", "dp_shard=2 etp=2"])
def test_every_implementation_of_the_interface_equals_one_device(mesh: str, implementation: str) -> None:
    for kind in KINDS[:4]:
        for routing in ("even", "one"):
            found = pool(2).run(judge, mesh, kind, routing, implementation, 0)
            assert max(found) <= (TOL_FP32 if implementation == "grouped_mm" else TOL_FP64), (kind, routing, found)


def test_copies_of_busy_experts_change_nothing() -> None:
    for kind in KINDS[:2]:
        assert max(pool(2).run(judge, "dp_shard=2 ep=2", kind, "even", "eager", 2)) <= TOL_FP64


# ------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1])
def test_a_plan_is_read_from_what_the_experts_declare(kind: tuple[str, str]) -> None:
    style = declared_experts(module_of(kind))
    assert style is not None
    assert style.takes == "indices"
    assert style.transposed == (kind[0] in ("gpt_oss", "aria"))
    assert style.packed == {"gpt_oss": "pairs", "nemotron_h": ""}.get(kind[0], "halves")
    assert ("down_proj_bias" in style.rows) == (kind[0] == "gpt_oss")


def test_what_is_not_as_it_declares_stays_whole() -> None:
    learned = module_of(KINDS[0])
    learned.act_fn = nn.PReLU()
    fewer = module_of(KINDS[0])
    fewer.num_experts = EXPERTS - 1
    extra = module_of(KINDS[0])
    extra.scale = nn.Parameter(torch.ones(EXPERTS))
    after = module_of(KINDS[0])
    after.has_post_expert_norm = True
    for module in (learned, fewer, extra, after, nn.Linear(2, 2)):
        assert declared_experts(module) is None


def changed(change: str) -> nn.Module:
    """mixtral's experts with a fault planted in what they do with rows or with features."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    def gate(self: Any, both: Tensor) -> Tensor:
        first, second = both.chunk(2, dim=-1)
        if change == "features":
            return first.softmax(-1) * second
        if change == "rows":
            return (first - first.mean(0)) * second
        if change == "pairs":
            return both[..., ::2] * both[..., 1::2]
        if change == "another expert":
            return first * second * self.gate_up_proj[0, 0, 0]
        return nn.functional.silu(first) * second

    module = module_of(KINDS[0])
    module.__class__ = type("Changed", (MixtralExperts,), {"_apply_gate": gate})
    return module


@pytest.mark.parametrize(
    ("change", "on_ep", "on_etp"),
    [
        ("nothing", "", ""),
        ("features", "", "_softmax.default at .*: it needs all of a dim"),
        ("pairs", "", "with another part of another tensor"),
        ("rows", "mean.dim at .*: it needs all of a dim", "mean.dim at .*: it needs all of a dim"),
        (
            "another expert",
            "reads 'gate_up_proj' not by the indices alone",
            "reads 'gate_up_proj' not by the indices alone",
        ),
    ],
)
def test_experts_whose_program_is_another_on_parts_are_refused(change: str, on_ep: str, on_etp: str) -> None:
    from meshkit.parallel.expert import plan_experts

    module = changed(change)
    plan = auto_plan(module).tensor
    for text, ep, etp in ((on_ep, 2, 1), (on_etp, 1, 2)):
        if not text:
            plan_experts(module, plan, ExpertPolicy(), ep=ep, etp=etp)
            continue
        with pytest.raises(
            PlanError, match=f"is not shown to be the same on {'ep or tp' if ep > 1 else 'etp'}: .*{text}"
        ):
            plan_experts(module, plan, ExpertPolicy(), ep=ep, etp=etp)
    assert plan_experts(module, plan, ExpertPolicy(), ep=1, etp=1)  # on one rank it is as it is
    if on_ep:
        with pytest.raises(PlanError, match=on_ep):  # ranks of tp share tokens
            plan_experts(module, plan, ExpertPolicy(), ep=1, etp=1, tp=2)


class ByHand(nn.Module):
    """Experts of nobody's interface, whose loop depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.rand(EXPERTS, FEATURES, WIDTH))
        self.down = nn.Parameter(torch.rand(EXPERTS, WIDTH, FEATURES))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            row, choice = torch.where(chosen == expert)
            result = torch.relu(x[row] @ self.up[expert].T) @ self.down[expert].T
            out = out.index_add(0, row, result * weights[row, choice, None])
        return out


def test_a_loop_over_values_is_taken_at_its_word_on_ep_and_refused_on_etp() -> None:
    from meshkit.parallel.expert import plan_experts

    plan = {"": experts(columns=("up",), rows=("down",), takes="indices")}
    assert plan_experts(ByHand(), plan, ExpertPolicy(), ep=2, etp=1)
    with pytest.raises(PlanError, match="its forward depends on values, so what it does with features cannot be read"):
        plan_experts(ByHand(), plan, ExpertPolicy(), ep=1, etp=2)


def by_hand() -> float:
    mesh = mesh_for("dp_shard=2 ep=2")
    torch.manual_seed(2)
    plain = ByHand().double()
    torch.manual_seed(2)
    module = ByHand().double()
    mk.expert_parallel(module, mesh["ep", "etp"], plan={"": experts(columns=("up",), rows=("down",), takes="indices")})
    x, index, weights = tokens(dist.get_rank(), "even", KINDS[0])
    return difference(module(x, index, weights), plain(x, index, weights))


def test_experts_by_hand_with_a_plan_by_hand_equal_one_device() -> None:
    assert max(pool(2).run(by_hand)) <= TOL_FP64


def test_ranks_without_an_expert_or_a_feature_are_refused() -> None:
    from meshkit.parallel.expert import expert_layouts

    module = module_of(KINDS[0])
    plan = auto_plan(module).tensor
    with pytest.raises(PlanError, match="has 5 experts, and ep=4 ranks with up to 2 each leave one without"):
        expert_layouts(module, plan, ep=4, etp=1)
    with pytest.raises(PlanError, match="have 11 hidden features, and etp=7 ranks"):
        expert_layouts(module, plan, ep=1, etp=7)


def test_a_plan_that_does_not_fit_the_stacks_is_refused() -> None:
    from meshkit.parallel.expert import expert_layouts

    module = module_of(KINDS[0])
    with pytest.raises(PlanError, match="names the parameters gate_proj, up_proj, down_proj, but the module has"):
        expert_layouts(module, {"": experts(takes="indices")}, ep=1, etp=1)
    with pytest.raises(PlanError, match=r"experts\(packed='thirds'\): choose one of"):
        experts(packed="thirds")  # type: ignore[arg-type]
    module.down_proj = nn.Parameter(torch.zeros(EXPERTS - 1, WIDTH, FEATURES))
    with pytest.raises(PlanError, match="needs parameters with a slice for each expert, but it has gate_up_proj"):
        style = experts(columns=("gate_up_proj",), packed="halves", takes="indices")
        expert_layouts(module, {"": style}, ep=1, etp=1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_packed_rows_are_dealt_out_once(ranks: int) -> None:
    for packed in ("halves", "pairs"):
        rows = [list(packed_rows(18, packed, ranks, rank)) for rank in range(ranks)]  # type: ignore[arg-type]
        assert sorted(row for of_rank in rows for row in of_rank) == list(range(18))
        assert all(of_rank == sorted(of_rank) for of_rank in rows)


def capacity(factor: float) -> float:
    mesh = mesh_for("dp_shard=2 ep=2")
    module, plain = module_of(KINDS[0]), module_of(KINDS[0])
    policy = ExpertPolicy(capacity=Capacity(factor=factor))
    mk.expert_parallel(module, mesh["ep", "etp"], plan={"": declared_experts(module)}, policy=policy)
    x, index, weights = tokens(dist.get_rank(), "even", KINDS[0])
    return difference(module(x, index, weights), plain(x, index, weights))


def test_a_capacity_that_suffices_drops_nothing_and_less_drops() -> None:
    assert max(pool(2).run(capacity, float(EXPERTS))) <= TOL_FP64
    assert min(pool(2).run(capacity, 0.3)) > 1e-3
