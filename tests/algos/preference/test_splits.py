"""Law 3 for objectives: the parts of a step add up to the whole, for every kind and any split; and no part is infinite."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import meshkit as mk
from meshkit.algos.preference import (
    PREFERENCE_KINDS,
    UNPAIRED_KINDS,
    Pairs,
    PreferenceLoss,
    RunningMean,
    UnpairedLoss,
    aot_partners,
    aot_unpaired_partners,
    bradley_terry,
    kto_kl,
    length_ratio,
    mean_of,
    pcrm,
    preference_loss,
    sum_and_count,
    unpaired_loss,
)
from meshkit.algos.preference._pairs import PER_PAIR
from meshkit.core.sharding import full_tensor
from tests.laws.parity.cases import mesh_for
from tests.world import pool

TOL_FP64_SUM = 1e-12  # relative: only summation order differs
NEEDED = {"exo": {"label_smoothing": 0.1}, "simpo": {"beta": 2.0, "margin": 0.5}}
LOSSES = [
    *(PreferenceLoss(kind=kind, **NEEDED.get(kind, {})) for kind in PREFERENCE_KINDS),
    *(PreferenceLoss(kind="sigmoid", divergence=divergence) for divergence in ("forward_kl", "js", "alpha")),
    PreferenceLoss(kind="ipo_mean", divergence="forward_kl"),
    PreferenceLoss(kind="discopop", divergence="alpha", alpha=1.5),
    PreferenceLoss(kind="sigmoid", average=True, label_smoothing=0.1),
    PreferenceLoss(kind="robust", label_smoothing=0.1),
]
IDS = [f"{loss.kind}-{loss.divergence}-{'mean' if loss.average else 'sum'}" for loss in LOSSES]


def whole_step(rows: int, seed: int) -> Pairs:
    """With repeated values, so that sorting meets ties."""
    generator = torch.Generator().manual_seed(seed)

    def values() -> Tensor:
        return torch.randint(-40, 0, (rows,), generator=generator).double() / 4

    chosen, rejected, ref_chosen, ref_rejected = values(), values(), values(), values()
    tokens = torch.randint(0, 9, (2, rows), generator=generator)
    return Pairs(
        chosen=chosen.requires_grad_(),
        rejected=rejected.requires_grad_(),
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        chosen_tokens=tokens[0],
        rejected_tokens=tokens[1],
    )


def first_pass(pairs: Pairs, loss: PreferenceLoss, cuts: list[slice]) -> Pairs:
    """With the statistics of the step, from sums of its parts."""
    assert pairs.ref_chosen is not None and pairs.ref_rejected is not None and pairs.chosen_tokens is not None
    w, r = (pairs.chosen - pairs.ref_chosen).detach(), (pairs.rejected - pairs.ref_rejected).detach()
    partners = None
    if loss.kind == "aot":
        partners = aot_partners(pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected)
    elif loss.kind == "aot_unpaired":
        partners = aot_unpaired_partners(w, r)
    zero = torch.zeros(2, dtype=torch.float64)
    rewards = sum((sum_and_count(loss.beta * torch.cat([w[cut], r[cut]])) for cut in cuts), zero)
    tokens = sum((sum_and_count(pairs.chosen_tokens[cut]) for cut in cuts), zero)
    return dataclasses.replace(
        pairs,
        partners=partners,
        reward_shift=RunningMean().after(rewards).mean,
        tokens_per_pair=mean_of(tokens).clamp(min=1),
    )


def part_of(pairs: Pairs, cut: slice) -> Pairs:
    rows = {name: getattr(pairs, name)[cut] for name in (*PER_PAIR, "partners") if getattr(pairs, name) is not None}
    return dataclasses.replace(pairs, **rows)


def sum_and_gradients(pairs: Pairs, loss: PreferenceLoss, cuts: list[slice]) -> list[Tensor]:
    full = first_pass(pairs, loss, cuts)
    total = torch.zeros((), dtype=torch.float64)
    for cut in cuts:
        total = total + preference_loss(part_of(full, cut), loss).losses.sum()
    return [total.detach(), *torch.autograd.grad(total, (pairs.chosen, pairs.rejected), materialize_grads=True)]


def assert_close(got: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().sum() <= TOL_FP64_SUM * max(1.0, other.abs().max().item() if other.numel() else 0)


@pytest.mark.parametrize("loss", LOSSES, ids=IDS)
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(0, 9), at=st.lists(st.integers(0, 9), max_size=4), seed=st.integers(0, 9))
def test_parts_of_a_step_add_up_to_the_whole(loss: PreferenceLoss, rows: int, at: list[int], seed: int) -> None:
    """Parts of any size, some of them empty."""
    pairs = whole_step(rows, seed)
    edges = [0, *sorted(min(cut, rows) for cut in at), rows]
    cuts = [slice(first, last) for first, last in itertools.pairwise(edges)]
    assert_close(sum_and_gradients(pairs, loss, cuts), sum_and_gradients(pairs, loss, [slice(0, rows)]))


@pytest.mark.parametrize("kind", ["aot", "aot_unpaired"])
def test_aot_in_two_passes_is_aot_of_the_sorted_step(kind: str) -> None:
    pairs = whole_step(9, 3)
    assert pairs.ref_chosen is not None and pairs.ref_rejected is not None
    one, other = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected
    if kind == "aot":
        one, other = pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected
    total = -nn.functional.logsigmoid(0.1 * (one.sort(stable=True).values - other.sort(stable=True).values)).sum()
    expected = [total.detach(), *torch.autograd.grad(total, (pairs.chosen, pairs.rejected))]
    got = sum_and_gradients(pairs, PreferenceLoss(kind=kind), [slice(0, 2), slice(2, 2), slice(2, 9)])
    assert_close(got, expected)


def test_parts_with_statistics_of_their_own_do_not_add_up() -> None:
    """What the two passes are for."""
    for kind in ("aot", "aot_unpaired", "bco", "sft"):
        pairs, loss = whole_step(8, 1), PreferenceLoss(kind=kind)
        halves = [part_of(pairs, slice(0, 4)), part_of(pairs, slice(4, 8))]
        apart = sum(sum_and_gradients(half, loss, [slice(0, 4)])[0] for half in halves)
        assert abs(apart - sum_and_gradients(pairs, loss, [slice(0, 8)])[0]) > 1e-4, kind


@pytest.mark.parametrize("kind", UNPAIRED_KINDS)
def test_parts_of_answers_add_up_to_the_whole(kind: str) -> None:
    pairs = whole_step(9, 2)
    policy, ref = pairs.chosen.detach().requires_grad_(), pairs.ref_chosen
    assert ref is not None
    desirable = torch.arange(9) % 3 == 0

    def total(cuts: list[slice]) -> list[Tensor]:
        ratios = (policy - ref).detach()
        sums = sum((sum_and_count(ratios[cut] + 2) for cut in cuts), torch.zeros(2, dtype=torch.float64))
        point = None if kind == "apo_zero_unpaired" else kto_kl(sums)
        loss = UnpairedLoss(kind=kind, undesirable_weight=1.3)
        values = [unpaired_loss(policy[cut], ref[cut], desirable[cut], loss, reference_point=point) for cut in cuts]
        summed = torch.stack([value.losses.sum() for value in values]).sum()
        return [summed.detach(), *torch.autograd.grad(summed, policy)]

    assert_close(total([slice(0, 4), slice(4, 4), slice(4, 9)]), total([slice(0, 9)]))


def test_the_reference_point_of_kto_is_never_negative() -> None:
    assert kto_kl(sum_and_count(torch.tensor([-3.0, 1.0]))) == 0
    assert kto_kl(sum_and_count(torch.tensor([3.0, -1.0]))) == 1
    assert kto_kl(sum_and_count(torch.empty(0))) == 0


def test_the_running_mean_is_that_of_all_values_so_far() -> None:
    values = [torch.tensor([1.0, 2.0]), torch.empty(0), torch.tensor([6.0])]
    mean = RunningMean()
    assert mean.mean == 0
    for part in values:
        mean = mean.after(sum_and_count(part))
    assert mean == RunningMean(total=9.0, count=3.0) and mean.mean == 3


# --------------------------------------------------------------------------------------------------------- finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("loss", LOSSES, ids=IDS)
def test_extreme_log_ratios_have_finite_losses_and_gradients(loss: PreferenceLoss, dtype: torch.dtype) -> None:
    grid = torch.cartesian_prod(*[torch.tensor([-1e4, -30.0, -1e-3, 0.0])] * 4).to(dtype)  # log-ratios up to ±1e4
    chosen, rejected = grid[:, 0].clone().requires_grad_(), grid[:, 1].clone().requires_grad_()
    pairs = Pairs(
        chosen=chosen,
        rejected=rejected,
        ref_chosen=grid[:, 2],
        ref_rejected=grid[:, 3],
        chosen_tokens=torch.arange(len(grid)) % 3,  # and answers without tokens
        rejected_tokens=torch.arange(len(grid)) % 2,
    )
    values = preference_loss(first_pass(pairs, loss, [slice(None)]), loss)
    gradients = torch.autograd.grad(values.losses.sum(), (chosen, rejected), materialize_grads=True)
    for tensor in (values.losses, values.margins, *gradients):
        assert tensor.isfinite().all()
    assert values.losses.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_other_objectives_are_finite_at_extremes(dtype: torch.dtype) -> None:
    grid = torch.cartesian_prod(*[torch.tensor([-1e4, -1.0, 0.0, 1.0, 1e4])] * 2).to(dtype).requires_grad_()
    one, other = grid[:, 0], grid[:, 1]
    losses = [
        bradley_terry(one, other, margin_N=other.detach(), preference_N=(other > 0).float(), center=0.1).losses,
        pcrm(one, other, length_ratio(torch.arange(25) % 3, torch.arange(25) % 2)).losses,
        *(
            unpaired_loss(
                one, other, one > 0, UnpairedLoss(kind=kind), reference_point=None if "apo" in kind else 1e4
            ).losses
            for kind in UNPAIRED_KINDS
        ),
    ]
    torch.cat(losses).sum().backward()
    assert torch.cat(losses).isfinite().all() and grid.grad is not None and grid.grad.isfinite().all()


def test_a_score_goes_on_as_a_straight_line_beyond_its_limit() -> None:
    """Forward KL at log-ratios -30, -31, -1000: e^30 times 1, 2, 971."""
    ratios = torch.tensor([-30.0, -31.0, -1000.0], dtype=torch.float64)
    zeros = torch.zeros(3, dtype=torch.float64)
    pairs = Pairs(chosen=zeros, rejected=ratios, ref_chosen=zeros, ref_rejected=zeros)
    margins = preference_loss(pairs, PreferenceLoss(kind="ipo_sum", beta=1e9, divergence="forward_kl")).losses.sqrt()
    expected = math.exp(30) * torch.tensor([1, 2, 971], dtype=torch.float64) - 1
    assert ((margins - expected) / expected).abs().max() < 1e-14


# ------------------------------------------------------------------------------------------------------ in a step


class Policy(nn.Module):
    """A log-probability of each answer, from its features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 16).double(), nn.Linear(16, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return -self.down(torch.tanh(self.up(x))).squeeze(-1).exp()


def rows_of_step() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 2, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "ref": -torch.rand(3, 2, generator=generator, dtype=torch.float64) * 3}


def unpaired_aot(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    chosen, rejected = model(part["x"]).unbind(1)
    pairs = Pairs(
        chosen=chosen,
        rejected=rejected,
        ref_chosen=part["ref"][:, 0],
        ref_rejected=part["ref"][:, 1],
        partners=part["partners"],
    )
    return preference_loss(pairs, PreferenceLoss(kind="aot_unpaired")).losses.sum()


def count_pairs(part: dict[str, Tensor]) -> Tensor:
    return torch.tensor(len(part["x"]))


def two_passes(axes: str, microbatches: int) -> tuple[float, dict[str, Tensor]]:
    mesh = mesh_for(axes)
    run = mk.parallelize(Policy(), mesh)
    batch = {name: tensor.tensor_split(mesh.data_ranks)[mesh.data_rank] for name, tensor in rows_of_step().items()}
    ratios: list[Tensor] = []

    def look(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        ratios.append(model(part["x"]) - part["ref"])
        return ratios[0].sum()

    run.evaluate(batch, loss=look, count=count_pairs)
    gathered: list[Any] = [None] * mesh.data_ranks
    dist.all_gather_object(gathered, ratios[0][: len(batch["x"])])  # a rank without rows looked at a row of zeros
    partners = aot_unpaired_partners(*torch.cat(gathered).unbind(1))
    batch["partners"] = partners.tensor_split(mesh.data_ranks)[mesh.data_rank]
    loss = run.forward_backward(batch, microbatches=microbatches, loss=unpaired_aot, count=count_pairs)
    return loss.item(), {name: full_tensor(param.grad) for name, param in run.named_parameters()}


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_sorted_objective_in_two_passes_equals_one_device(microbatches: int) -> None:
    """On 4 ranks for 3 pairs: one rank has none."""
    policy, rows = Policy(), rows_of_step()
    w, r = (policy(rows["x"]) - rows["ref"]).unbind(1)
    total = -nn.functional.logsigmoid(0.1 * (w.sort().values - r.sort().values)).mean()
    total.backward()
    for loss, gradients in pool(4).run(two_passes, "dp_replicate=2 dp_shard=2", microbatches):
        assert abs(loss - total.item()) < TOL_FP64_SUM
        for name, param in policy.named_parameters():
            assert param.grad is not None and (gradients[name] - param.grad).abs().max() < TOL_FP64_SUM
