"""Experts and routers against loops over tokens, and against transformers' routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from meshkit.errors import PlanError
from meshkit.models import Experts, MoE, Router, RouterConfig
from meshkit.models import router as router_module
from meshkit.models.experts import expert_kernel
from meshkit.moe.routing import Routing, combine, sort_by_expert, take_rows

TOL_FP64 = 1e-12  # only the order of sums may differ
TOL_FP32 = 1e-5  # the same, relative to the largest value
TOL_BF16 = 2e-2  # two roundings to 8 bits
CHANNELS, FEATURES, EXPERTS = 16, 24, 5


def experts(dtype: torch.dtype, kernel: Any = None) -> Experts:
    torch.manual_seed(0)
    return Experts(EXPERTS, CHANNELS, FEATURES, kernel=kernel).to(dtype)


def routing_of(kind: str, dtype: torch.dtype, tokens: int = 40) -> Routing:
    """any: experts at random. one: every token to expert 3. few: experts 0, 2 and 4 get nothing. none: no tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = 0 if kind == "none" else tokens
    ranked = torch.rand(tokens, EXPERTS, generator=generator, dtype=torch.float64)
    if kind == "one":
        return Routing(torch.full((tokens, 1), 3), ranked[:, :1].to(dtype))
    if kind == "few":
        ranked[:, [0, 2, 4]] = -1.0
    weights = torch.rand(tokens, 2, generator=generator, dtype=torch.float64)
    return Routing(ranked.topk(2).indices, weights.to(dtype))


def naive(module: Experts, x_NC: Tensor, routing: Routing) -> Tensor:
    rows = []
    for token, (chosen, weights) in enumerate(zip(*routing[:2], strict=True)):
        total = torch.zeros_like(x_NC[token])
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            gated = F.silu(module.gate_proj[expert] @ x_NC[token]) * (module.up_proj[expert] @ x_NC[token])
            total = total + weight * (module.down_proj[expert] @ gated)
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(x_NC)


def with_gradients(out: Tensor, module: Experts, x: Tensor, weights: Tensor) -> list[Tensor]:
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    wrt = [x, weights, *module.parameters()]
    found = torch.autograd.grad(out, wrt, cotangent, allow_unused=True, create_graph=True)
    return [out, *(torch.zeros_like(value) if grad is None else grad for grad, value in zip(found, wrt, strict=True))]


def assert_all_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        scale = max(other.abs().max().item(), 1.0) if other.numel() else 1.0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * scale)


# --------------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("kind", ["any", "one", "few", "none"])
def test_experts_and_every_gradient_equal_a_loop_over_tokens(kind: str) -> None:
    module = experts(torch.float64)
    x = torch.randn(0 if kind == "none" else 40, CHANNELS, dtype=torch.float64, requires_grad=True)
    routing = routing_of(kind, torch.float64)
    routing.weights_NK.requires_grad_()
    expected = with_gradients(naive(module, x, routing), module, x, routing.weights_NK) if len(x) else None
    found = with_gradients(module(x, routing), module, x, routing.weights_NK)
    if expected is None:
        assert all(not value.any() for value in found)
    else:
        assert_all_close(found, expected, TOL_FP64)


@pytest.mark.parametrize("kind", ["any", "one", "few", "none"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, TOL_FP32), (torch.bfloat16, TOL_BF16)])
def test_both_kernels_agree_also_in_second_derivatives(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    results = []
    for kernel in ("grouped", "loop"):
        module = experts(dtype, kernel)
        torch.manual_seed(2)
        x = torch.randn(0 if kind == "none" else 40, CHANNELS, dtype=dtype, requires_grad=True)
        routing = routing_of(kind, torch.float32)
        routing.weights_NK.requires_grad_()
        first = with_gradients(module(x, routing), module, x, routing.weights_NK)
        penalty = sum(grad.square().sum() for grad in first[1:])
        second = torch.autograd.grad(penalty, [x, *module.parameters()], allow_unused=True)
        results.append([*first, *(grad for grad in second if grad is not None)])
    assert_all_close(*results, tolerance)


@pytest.mark.parametrize("kernel", ["grouped", "loop"])
def test_a_second_backward_of_one_graph_gives_the_same_gradients(kernel: str) -> None:
    """torch's grouped_mm leaves rows it was not told of as they are: what is stale shows the second time."""
    module, routing = experts(torch.float32, kernel), routing_of("few", torch.float32)
    x = torch.randn(40, CHANNELS, requires_grad=True)
    out = module(x, routing)
    first, second = (
        torch.autograd.grad(out.square().sum(), [x, *module.parameters()], retain_graph=True) for _ in "12"
    )
    assert all(torch.equal(one, other) and one.isfinite().all() for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("kernel", ["grouped", "loop"])
@pytest.mark.parametrize("counts", [[3, 0, 2, 0, 4], [0, 0, 0, 0, 9], [0] * 5])
def test_compute_takes_counts_in_both_forms_and_an_expanded_gradient(kernel: str, counts: list[int]) -> None:
    module = experts(torch.float32, kernel)
    x = torch.randn(sum(counts), CHANNELS, requires_grad=True)
    found = module.compute(x, counts)
    assert torch.equal(found, module.compute(x, torch.tensor(counts)))
    each = torch.arange(EXPERTS).repeat_interleave(torch.tensor(counts)).unsqueeze(1)
    expected = naive(module, x, Routing(each, torch.ones(len(x), 1)))
    assert_all_close([found], [expected], TOL_FP32)
    found.sum().backward()  # its gradient is one number, expanded
    grads = [x.grad, *(param.grad for param in module.parameters())]
    oracle = torch.autograd.grad(expected.sum(), [x, *module.parameters()]) if sum(counts) else None
    for index, grad in enumerate(grads):
        assert grad is not None
        assert_all_close([grad], [oracle[index] if oracle else torch.zeros_like(grad)], TOL_FP32)


@given(experts_NK=st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), max_size=9))
def test_pairs_are_sorted_by_expert_then_token_and_put_back(experts_NK: list[list[int]]) -> None:
    chosen = torch.tensor(experts_NK, dtype=torch.int64).reshape(-1, 3)
    order, counts = sort_by_expert(chosen, 7)
    pairs = sorted(range(chosen.numel()), key=lambda pair: (experts_NK[pair // 3][pair % 3], pair))
    assert order.tolist() == pairs
    assert counts.tolist() == [sum(row.count(expert) for row in experts_NK) for expert in range(7)]
    x = torch.arange(chosen.shape[0] * 2.0).view(-1, 2)
    rows = take_rows(x, order, choices=3)
    assert rows.tolist() == [x[pair // 3].tolist() for pair in pairs]
    weights = torch.arange(1.0, chosen.numel() + 1).view(-1, 3)
    assert torch.equal(combine(rows, order, weights), x * weights.sum(1, keepdim=True))


def test_rows_are_combined_in_fp32() -> None:
    """In bf16, 256 + 1 is 256 and 1 / 3 is 0.334."""
    rows = torch.tensor([[256.0], [1.0], [-256.0]], dtype=torch.bfloat16)
    out = combine(rows, torch.arange(3), torch.tensor([[1.0, 1 / 3, 1.0]]))
    assert (out.dtype, out.item()) == (torch.float32, pytest.approx(1 / 3, rel=1e-4))  # of 256, fp32 keeps 5 digits
    module = experts(torch.bfloat16)
    assert module(torch.randn(40, CHANNELS).bfloat16(), routing_of("any", torch.float32)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "sizes", "kernel", "why"),
    [
        (torch.float32, (24, 16), "grouped", "one call for all experts on cpu"),
        (torch.bfloat16, (24, 16), "grouped", "one call for all experts on cpu"),
        (torch.float64, (24, 16), "loop", "takes no torch.float64"),
        (torch.float32, (24, 18), "loop", r"needs rows of a multiple of 16 bytes, but has \(24, 18\) torch.float32"),
        (torch.bfloat16, (20, 16), "loop", r"needs rows of a multiple of 16 bytes, but has \(20, 16\) torch.bfloat16"),
    ],
)
def test_a_kernel_is_chosen_for_a_reason_and_an_impossible_one_refused(
    dtype: torch.dtype, sizes: tuple[int, int], kernel: str, why: str
) -> None:
    chosen = expert_kernel(dtype, torch.device("cpu"), sizes)
    assert chosen.kernel == kernel
    module = Experts(EXPERTS, sizes[1], sizes[0]).to(dtype)
    x = torch.randn(EXPERTS, sizes[1], dtype=dtype)
    assert module.compute(x, [1] * EXPERTS).isfinite().all()
    module.kernel = "grouped"
    if kernel == "loop":
        with pytest.raises(PlanError, match=f"kernel='grouped' cannot be: torch's grouped_mm {why}. Use kernel='loop'"):
            module.compute(x, [1] * EXPERTS)
    else:
        assert why in chosen.why


@pytest.mark.parametrize(
    ("dtype", "capability", "kernel", "why"),
    [
        (torch.bfloat16, (9, 0), "grouped", "one kernel for all experts on cuda"),
        (torch.bfloat16, (10, 0), "grouped", "one kernel for all experts on cuda"),
        (torch.bfloat16, (8, 0), "loop", "one kernel from compute capability 9.0 on, and this is 8.0"),
        (torch.float32, (9, 0), "loop", "one kernel on cuda in bf16 alone, and a loop in torch.float32"),
        (torch.float16, (10, 0), "loop", "one kernel on cuda in bf16 alone, and a loop in torch.float16"),
        (torch.bfloat16, None, "grouped", "one kernel for all experts on cuda"),
    ],
)
def test_on_cuda_grouped_is_chosen_where_it_is_one_kernel(dtype, capability, kernel, why, monkeypatch) -> None:
    """As far as a machine without a GPU can tell; None is one without."""
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chosen = expert_kernel(dtype, torch.device("cuda"), (64, 32))
    assert chosen.kernel == kernel
    assert why in chosen.why


# ---------------------------------------------------------------------------------------------------------- router


def ours_and_transformers(config: RouterConfig, weight: Tensor, bias: Tensor | None) -> tuple[Router, Any]:
    values = {"hidden_size": weight.shape[1], "num_experts_per_tok": config.chosen, "norm_topk_prob": config.normalise}
    if config.score == "sigmoid":
        oracle: Any = DeepseekV3TopkRouter(
            transformers.DeepseekV3Config(
                **values,
                n_routed_experts=config.experts,
                n_group=config.groups,
                topk_group=config.top_groups,
                routed_scaling_factor=config.scale,
            )
        )
        oracle.e_score_correction_bias.copy_(bias)
    else:
        oracle = Qwen3MoeTopKRouter(transformers.Qwen3MoeConfig(**values, num_experts=config.experts))
    router = Router(weight.shape[1], config)
    for module in (router, oracle):
        module.weight.data.copy_(weight)
    if bias is not None:
        assert router.e_score_correction_bias is not None
        router.e_score_correction_bias.copy_(bias)
    return router, oracle


INFINITE = torch.tensor([0, 0, 0, -torch.inf, -torch.inf, -torch.inf, 0.5, 0, 0, 0, -torch.inf, 0])
ROUTERS = {
    "softmax": RouterConfig(experts=12, chosen=4),
    "normalised": RouterConfig(experts=12, chosen=4, normalise=True),
    "sigmoid": RouterConfig(experts=12, chosen=4, score="sigmoid", normalise=True, scale=2.5, bias=True),
    "groups": RouterConfig(experts=12, chosen=4, score="sigmoid", scale=1.5, groups=4, top_groups=2, bias=True),
}


@pytest.mark.parametrize("tied", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize(
    "bias", [torch.zeros(12), torch.linspace(-0.3, 0.3, 12).flip(0), INFINITE], ids=["0", "b", "inf"]
)
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_chooses_what_transformers_chooses(name: str, bias: Tensor, tied: bool) -> None:
    """Also between experts of equal scores, and where a bias of -inf closes experts and whole groups."""
    torch.manual_seed(0)
    weight = torch.randn(12, 8)
    if tied:
        weight = weight[[0, 0, 1, 1, 0, 2, 2, 1, 0, 0, 2, 2]]
    router, oracle = ours_and_transformers(ROUTERS[name], weight, bias if ROUTERS[name].bias else None)
    x = torch.randn(3, 50, 8)
    routing = router(x)
    _, weights, indices = oracle(x)
    assert routing.experts_NK.shape == (150, 4)
    order, expected_order = routing.experts_NK.argsort(-1), indices.argsort(-1)
    assert torch.equal(routing.experts_NK.gather(1, order), indices.gather(1, expected_order))
    found, expected = routing.weights_NK.gather(1, order), weights.gather(1, expected_order)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_softmax_of_the_chosen_is_the_normalised_softmax_of_all() -> None:
    torch.manual_seed(0)
    weight = torch.randn(12, 8)
    routers = [
        ours_and_transformers(RouterConfig(experts=12, chosen=3, **options), weight, None)[0].double()
        for options in ({"score": "softmax_of_chosen"}, {"normalise": True})
    ]
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    found, expected = (router(x) for router in routers)
    assert torch.equal(found.experts_NK, expected.experts_NK)
    torch.testing.assert_close(found.weights_NK, expected.weights_NK, rtol=0, atol=TOL_FP64)


def test_logits_are_fp32_in_a_bf16_model_and_fp64_in_an_fp64_one() -> None:
    torch.manual_seed(0)
    router = Router(64, RouterConfig(experts=12, chosen=4)).bfloat16()
    x = torch.randn(2, 30, 64).bfloat16()
    logits = x.flatten(0, 1).double() @ router.weight.double().T
    weights = router(x).weights_NK
    assert weights.dtype == torch.float32
    expected = logits.softmax(-1).topk(4).values
    assert (weights - expected).abs().max() <= 1e-6  # bf16 logits would be off by 1e-3
    assert (router.double()(x.double()).weights_NK - expected).abs().max() <= TOL_FP64


def test_the_bias_chooses_and_does_not_weigh() -> None:
    torch.manual_seed(0)
    config = RouterConfig(experts=4, chosen=2, score="sigmoid", bias=True)
    router = Router(8, config)
    assert router.e_score_correction_bias is not None
    router.e_score_correction_bias[1] = 10.0
    x = torch.randn(1, 20, 8)
    routing = router(x)
    assert (routing.experts_NK == 1).any(-1).all()
    scores = (x[0] @ router.weight.T).sigmoid()
    torch.testing.assert_close(routing.weights_NK, scores.gather(1, routing.experts_NK), rtol=1e-6, atol=1e-6)
    assert "e_score_correction_bias" in router.state_dict()


def test_a_mixture_adds_the_experts_that_every_token_visits() -> None:
    torch.manual_seed(0)
    config = RouterConfig(experts=4, chosen=2, normalise=True)
    module = MoE(CHANNELS, FEATURES, config, shared_size=10).double()
    x = torch.randn(2, 7, CHANNELS, dtype=torch.float64)
    expected = naive(module.experts, x.flatten(0, 1), module.gate(x)).view_as(x)
    assert module.shared_experts is not None
    torch.testing.assert_close(module(x), expected + module.shared_experts(x), rtol=0, atol=TOL_FP64)
    module.shared_experts = None
    torch.testing.assert_close(module(x), expected, rtol=0, atol=TOL_FP64)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"score": "relu"}, "score='relu' is not known. Use softmax, softmax_of_chosen or sigmoid"),
        ({"groups": 5}, "12 experts are not 5 equal groups of which 1 can be chosen"),
        ({"groups": 4, "top_groups": 5}, "12 experts are not 4 equal groups of which 5 can be chosen"),
        ({"groups": 12, "top_groups": 4}, "groups=12 have one expert each"),
        ({"groups": 4, "top_groups": 1}, "cannot choose 4 of 3 experts .1 of 4 groups of 3"),
        ({"chosen": 0}, "cannot choose 0 of 12 experts"),
    ],
)
def test_a_router_that_cannot_be_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        RouterConfig(**{"experts": 12, "chosen": 4, **values})


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_a_router_s_product_in_16_bits_is_that_of_fp32_and_keeps_no_wide_copy(weight_dtype: torch.dtype) -> None:
    """Bit for bit, with gradients, also of gradients; backward keeps the router's input itself."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(7, 64, dtype=weight_dtype, requires_grad=True)
    results, kept = [], list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    for product in (router_module._logits, lambda x, weight: F.linear(x.float(), weight.float())):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = product(x, weight)
        if product is router_module._logits:
            assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), weight.data_ptr()}
        first = torch.autograd.grad(logits.sin().sum(), (x, weight), create_graph=True)
        second = torch.autograd.grad(sum(grad.float().square().sum() for grad in first), (x, weight))
        results.append([logits, *first, *second])
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).float().norm() <= TOL_BF16 * theirs.float().norm()
    assert torch.equal(results[0][0], results[1][0])
