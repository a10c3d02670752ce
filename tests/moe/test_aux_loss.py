"""Auxiliary losses against loops over tokens, what recompute may not repeat, and the balance of experts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshkit.errors import PlanError
from meshkit.models import MoE, Router, RouterConfig
from meshkit.moe.aux_loss import AuxiliaryLosses, balance, collect, update_bias

TOL_FP64 = 1e-12  # only the order of sums may differ
ROWS, TOKENS, CHANNELS, EXPERTS, CHOSEN = 3, 11, 8, 6, 2


def router(losses: AuxiliaryLosses, **options: Any) -> Router:
    torch.manual_seed(0)
    module = Router(CHANNELS, RouterConfig(experts=EXPERTS, chosen=CHOSEN, losses=losses, **options)).double()
    module.weight.data.mul_(5)  # far from even
    return module


def hidden(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def share_of_each(module: Router, token: Tensor) -> Tensor:
    logits = module.weight @ token
    if module.config.score == "sigmoid":
        return logits.sigmoid() / logits.sigmoid().sum()
    return logits.exp() / logits.exp().sum()


def paper_balance(module: Router, rows: list[Tensor]) -> Tensor:
    """Of each row: its tokens times E / (K T^2) sum_i counts_i sum_t p_ti, one token and one expert after the other."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        counts, shares = [0] * EXPERTS, [torch.zeros((), dtype=torch.float64)] * EXPERTS
        for token in row:
            for expert in module(token.view(1, 1, -1)).experts_NK[0].tolist():
                counts[expert] += 1
            for expert, share in enumerate(share_of_each(module, token)):
                shares[expert] = shares[expert] + share
        factor = len(row) * EXPERTS / (CHOSEN * len(row) ** 2)
        total = total + factor * sum(count * share for count, share in zip(counts, shares, strict=True))
    return total


def collected(module: nn.Module, *inputs: Tensor) -> Any:
    with collect() as auxiliary:
        for x in inputs:
            module(x)
    return auxiliary


# ---------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("score", ["softmax", "softmax_of_chosen", "sigmoid"])
@pytest.mark.parametrize("per", ["sequence", "batch"])
def test_balance_and_its_gradient_equal_a_loop_over_tokens(score: Any, per: Any) -> None:
    module = router(AuxiliaryLosses(balance=0.3, per=per), score=score)
    x = hidden()
    found = collected(module, x).losses["balance"]
    expected = 0.3 * paper_balance(module, list(x) if per == "sequence" else [x.flatten(0, 1)])
    assert abs(found - expected) <= TOL_FP64 * expected
    (grad,), (oracle,) = (torch.autograd.grad(loss, module.weight) for loss in (found, expected))
    torch.testing.assert_close(grad, oracle, rtol=0, atol=TOL_FP64 * oracle.abs().max().item())
    assert oracle.abs().max() > 0.01


def test_balance_is_the_tokens_when_even_and_more_when_not() -> None:
    even = router(AuxiliaryLosses(balance=1.0))
    even.weight.data.zero_()
    skewed = router(AuxiliaryLosses(balance=1.0))
    assert abs(collected(even, hidden()).losses["balance"] - ROWS * TOKENS) <= TOL_FP64 * ROWS * TOKENS
    assert collected(skewed, hidden()).losses["balance"] > 1.01 * ROWS * TOKENS


def test_z_is_the_squared_logsumexp_of_every_token() -> None:
    module = router(AuxiliaryLosses(z=0.1))
    x = hidden()
    losses = collected(module, x).losses
    logits = (module.weight @ x.reshape(-1, CHANNELS).T).T.tolist()
    expected = sum(0.1 * math.log(sum(math.exp(value) for value in token)) ** 2 for token in logits)
    assert losses.keys() == {"z"}
    assert abs(losses["z"] - expected) <= TOL_FP64 * expected


def test_global_balance_takes_the_counts_of_the_step_before_and_ignores_microbatches() -> None:
    module = router(AuxiliaryLosses(balance=0.3, per="global"))
    x = hidden()
    first = collected(module, x)
    assert first.losses["balance"] == 0
    assert module.last_counts is not None
    module.last_counts.copy_(torch.tensor([1, 5, 0, 3, 0, 7]))
    whole = collected(module, x).losses["balance"]
    parts = collected(module, x[:1], x[1:]).losses["balance"]
    shares = torch.stack([share_of_each(module, token) for token in x.view(-1, CHANNELS)]).sum(0)
    expected = 0.3 * EXPERTS * (torch.tensor([1, 5, 0, 3, 0, 7]) / 16 * shares).sum()
    assert abs(whole - expected) <= TOL_FP64 * expected
    assert abs(parts - whole) <= TOL_FP64 * expected


def test_of_rows_microbatches_change_nothing_and_of_batches_they_do() -> None:
    x = hidden()
    for per, same in (("sequence", True), ("batch", False)):
        module = router(AuxiliaryLosses(balance=1.0, per=per))  # type: ignore[arg-type]
        whole, parts = (collected(module, *inputs).losses["balance"] for inputs in ([x], [x[:1], x[1:], x[:0]]))
        assert (abs(whole - parts) <= TOL_FP64 * whole) == same


@pytest.mark.parametrize("per", ["sequence", "batch"])
def test_parts_of_the_tokens_with_the_counts_of_all_add_up_to_the_whole(per: Any) -> None:
    module = router(AuxiliaryLosses(balance=1.0, per=per))
    x = hidden()
    whole = collected(module, x).losses["balance"]
    counts: list[Tensor] = []
    module.reduce_counts = lambda counts_RE: counts.append(counts_RE) or counts_RE  # type: ignore[func-returns-value]
    halves = (x[:, :4], x[:, 4:])
    for half in halves:
        module(half)
    module.reduce_counts = lambda counts_RE: counts[0] + counts[1]
    parts = collected(module, *halves).losses["balance"]
    assert abs(parts - whole) <= TOL_FP64 * whole


# ------------------------------------------------------------------------------------------------------ collecting


class Layers(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        losses = AuxiliaryLosses(balance=0.5, z=0.1)
        config = RouterConfig(experts=EXPERTS, chosen=CHOSEN, losses=losses)
        self.layers = nn.ModuleList(MoE(CHANNELS, 12, config) for _ in range(2)).double()
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_recompute_reports_nothing_twice_and_changes_no_gradient(inside: bool) -> None:
    results, counts = [], []
    for recompute in (False, True):
        model, x = Layers(recompute), hidden().requires_grad_()
        calls: list[int] = []
        for layer in model.layers:
            layer.gate.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with collect() as auxiliary:
            loss = model(x).square().sum() + auxiliary.total()
            before = dict(auxiliary.losses)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert len(calls) == (4 if recompute else 2)
        assert auxiliary.losses == before
        counts.append(auxiliary.named_counts(model))
        results.append([loss, x.grad, *(param.grad for param in model.parameters()), *auxiliary.losses.values()])
    for found, expected in zip(*results, strict=True):
        assert found is not None
        assert torch.equal(found, expected)
    assert counts[0].keys() == {"layers.0.gate", "layers.1.gate"}
    for name, value in counts[1].items():
        assert value.sum() == ROWS * TOKENS * CHOSEN
        assert torch.equal(value, counts[0][name])


def test_losses_and_counts_are_summed_over_calls_and_layers() -> None:
    model, x = Layers(recompute=False), hidden()
    once, twice = collected(model, x), collected(model, x, x)
    assert once.losses.keys() == {"balance", "z"}
    assert abs(twice.total() - 2 * once.total()) <= TOL_FP64 * once.total()
    for module, counts in once.counts.items():
        assert torch.equal(twice.counts[module], 2 * counts)
    each = 0.0
    for layer in model.layers:
        each = each + collected(layer, x).losses["z"]
        x = x + layer(x)
    assert abs(once.losses["z"] - each) <= TOL_FP64 * each


def test_nothing_is_collected_outside_and_the_inner_of_two_blocks_gets_it() -> None:
    module, x = router(AuxiliaryLosses(z=1.0)), hidden()
    with collect() as outer:
        module(x)
        with collect() as inner:
            module(x)
            module(x)
    module(x)
    assert outer.counts[module].sum() == ROWS * TOKENS * CHOSEN
    assert inner.counts[module].sum() == 2 * ROWS * TOKENS * CHOSEN
    assert inner.losses["z"] == 2 * outer.losses["z"]
    plain = collected(router(AuxiliaryLosses()), x)
    assert (plain.losses, plain.total()) == ({}, 0.0)
    assert len(plain.counts) == 1


# --------------------------------------------------------------------------------------------------------- balance


def test_the_bias_rises_where_tokens_lack_and_keeps_its_mean() -> None:
    bias = torch.tensor([0.5, 0.0, 0.0, 0.1])
    update_bias(bias, torch.tensor([9, 1, 2, 0]), speed=0.1)  # mean 3: one above, three below
    # sign: -1, 1, 1, 1, whose mean of 0.5 is taken off.
    torch.testing.assert_close(bias, torch.tensor([0.35, 0.05, 0.05, 0.15]), rtol=0, atol=1e-7)
    for step in range(50):
        update_bias(bias, torch.tensor([step % 7, 3, 1, 8]), speed=0.1)
    assert abs(bias.mean() - 0.15) <= 1e-6
    before = bias.clone()
    update_bias(bias, torch.tensor([4, 4, 4, 4]), speed=0.1)
    assert torch.equal(bias, before)


def test_a_speed_that_rewards_imbalance_is_refused() -> None:
    with pytest.raises(PlanError, match="speed=-0.1 moves tokens to the experts that have most"):
        update_bias(torch.zeros(2), torch.tensor([1, 2]), speed=-0.1)


def test_the_bias_evens_out_a_router() -> None:
    module = router(AuxiliaryLosses(), score="sigmoid", bias=True)
    x = hidden(rows=40)
    loads = []
    for _ in range(200):
        counts = collected(module, x).counts[module]
        loads.append(balance(counts).max_over_mean.item())
        assert module.e_score_correction_bias is not None
        update_bias(module.e_score_correction_bias, counts, speed=0.01)
    assert loads[0] > 1.1
    assert loads[-1] < 1.05


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([5, 5, 5, 5], (1.0, 1.0, 0)),
        ([0, 8, 0, 0], (4.0, 0.0, 3)),
        ([1, 1, 0, 0], (2.0, 0.5, 2)),
        ([7], (1.0, 0.0, 0)),
    ],
)
def test_balance_statistics(counts: list[int], expected: tuple[float, float, int]) -> None:
    assert [value.item() for value in balance(torch.tensor(counts))] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"per": "token"}, "per='token' is not known. Choose sequence, batch or global"),
        ({"balance": -0.1}, "balance=-0.1 rewards imbalance. Use at least 0"),
        ({"z": -1.0}, "z=-1.0 is negative. Use at least 0"),
    ],
)
def test_losses_that_make_no_sense_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        dataclasses.replace(AuxiliaryLosses(), **values)
