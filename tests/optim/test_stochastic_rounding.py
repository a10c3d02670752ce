"""Stochastic rounding loses nothing on average, and every mesh draws the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.rng import random_bits
from meshkit.core.sharding import full_tensor, local_tensor
from meshkit.optim import LowBitAdamW
from meshkit.optim.low_bit import round_stochastically
from meshkit.step import Run
from meshkit.strategy import OptimizerPolicy
from tests.laws.parity.cases import Cell, mesh_for, start
from tests.world import RankError, pool

DRAWS = 4096


def test_the_mean_of_all_roundings_is_the_value() -> None:
    values = torch.tensor([1.0, 1 + 2**-9, -1 - 2**-10, 3.1415927, -1e-20, 0.0, 2.0**-130])
    every = torch.arange(1 << 16).unsqueeze(-1)  # each draw once: the mean is exact
    rounded = round_stochastically(values.expand(1 << 16, -1), every.expand(-1, len(values)))
    assert torch.equal(rounded.double().mean(0), values.double())
    near = torch.stack([rounded.amin(0), rounded.amax(0)]).float()
    assert ((near[1] - near[0]).abs() <= values.abs() * 2**-7).all()  # neighbours


def test_draws_are_unbiased() -> None:
    values = torch.tensor([1 + 2**-10, 0.3])
    drawn = random_bits(torch.arange(2 * DRAWS), 5, 16).view(DRAWS, 2)
    mean = round_stochastically(values.expand(DRAWS, 2), drawn).double().mean(0)
    gap = torch.tensor([2**-7, 2**-9], dtype=torch.float64)
    assert ((mean - values.double()).abs() <= 4 * 0.5 * gap / DRAWS**0.5).all()  # four deviations


def test_values_that_are_not_finite_stay_so() -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan])
    rounded = round_stochastically(values, torch.full((3,), 0xFFFF)).float()
    assert rounded[:2].tolist() == [torch.inf, -torch.inf] and rounded[2].isnan()


@pytest.mark.parametrize("stochastic", [True, False])
def test_small_updates_are_lost_to_the_nearest_and_kept_at_random(stochastic: bool) -> None:
    """A step of 1e-4 from 1: bf16 has no value within 2^-8 below, and Adam's step is lr."""
    param = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = LowBitAdamW(
        [("weight", param)], lr=1e-4, weight_decay=0.0, states="fp32", stochastic_rounding=stochastic
    )
    for _ in range(50):
        param.grad = torch.ones_like(param)
        optimizer.step()
    moved = 1 - param.detach().double().mean().item()
    if stochastic:
        assert moved == pytest.approx(50 * 1e-4, rel=0.05)
    else:
        assert moved == 0


def stepped(mesh: str) -> tuple[list[Tensor], bool]:
    """(whole parameters after steps with made-up gradients, whether replicas are one), each rank with a seed of its own."""
    policy = mk.MemoryPolicy(optimizer=OptimizerPolicy(stochastic_rounding=True, states="8bit"))
    run = start(Cell(mesh=mesh, dtype="bfloat16", hidden_mlp=160, memory=policy))
    optimizer = mk.adamw(run, lr=1e-3)
    torch.manual_seed(mesh_for(mesh).rank)
    for step in range(3):
        for index, param in enumerate(run.parameters()):
            whole = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + index))
            param.grad = _like(param, whole.bfloat16())
        optimizer.step()
    return [full_tensor(param).clone() for param in run.parameters()], _alike(run)


def _like(param: Tensor, whole: Tensor) -> Tensor:
    from meshkit.core import _torch
    from meshkit.core.sharding import local_slices

    part = whole[local_slices(param)].clone()
    return _torch.dtensor_like(param, part) if isinstance(param, torch.distributed.tensor.DTensor) else part


def _alike(run: Run) -> bool:
    """Parts that several ranks hold are the same on each."""
    mine = [local_tensor(param).float().sum().item() for param in run.parameters()]
    found: list[list[float]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(found, mine)
    pairs = [(0, 2), (1, 3)] if run.mesh.spec.dp_replicate == 2 else []
    return all(found[a] == found[b] for a, b in pairs)


def test_every_mesh_rounds_alike_whatever_the_ranks_seeds() -> None:
    """Blocks too: these meshes cut no row, or where blocks end."""
    alone, _ = pool(1).run(stepped, "dp_shard=1")[0]
    for mesh in ("dp_shard=4", "dp_replicate=2 dp_shard=2"):
        for params, alike in pool(4).run(stepped, mesh):
            assert alike
            assert all(torch.equal(a, b) for a, b in zip(params, alone, strict=True))


def test_rounding_needs_bf16_parameters() -> None:
    with pytest.raises(
        mk.errors.PlanError, match=r"rounds bf16 parameters, but '0.0' is torch.float32. Build the model in bf16"
    ):
        LowBitAdamW([nn.Parameter(torch.ones(2))], stochastic_rounding=True)


def in_fp32() -> None:
    start(Cell(mesh="tp=1", memory=mk.MemoryPolicy(optimizer=OptimizerPolicy(stochastic_rounding=True))))


def test_a_run_refuses_it_before_it_is_split() -> None:
    with pytest.raises(RankError, match="stochastic_rounding=True rounds bf16 parameters, but 'embed_tokens.weight'"):
        pool(1).run(in_fp32)
