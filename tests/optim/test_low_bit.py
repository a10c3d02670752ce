"""Moments in few bits train nearly as fp32 ones, on every mesh the same, and checkpoints keep them bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.core import rng
from meshkit.core.sharding import full_tensor
from meshkit.optim import BLOCKS, LowBitAdamW, LowBitState, block_of
from meshkit.strategy import OptimizerPolicy, States
from tests.depth import thin
from tests.laws.parity.cases import MAX_NORM, Cell, batches, own_rows, start
from tests.optim.test_host_offload import resume, save_half_way
from tests.world import pool

FEW: list[States] = ["8bit", "4bit", "fp8"]
TOL_FP32 = 2e-6  # of values about 0.1; torchao adds in another order
# Largest error of a value after storing it, as a share of its block's largest: half the widest gap between two levels.
WORST = {
    ("8bit", True): 0.0072,
    ("8bit", False): 0.0036,
    ("4bit", True): 0.12,
    ("4bit", False): 0.0625,
    ("fp8", True): 0.036,
}


@pytest.mark.parametrize(("states", "signed"), list(WORST))
@pytest.mark.parametrize("columns", [1, 7, 256, 300])
def test_values_come_back_within_half_of_the_widest_gap(states: States, signed: bool, columns: int) -> None:
    values = torch.randn(3, 5, columns, generator=torch.Generator().manual_seed(0))
    values = values if signed else values.abs()
    values[0] *= 1e-6
    values[1, 1] = 0
    codec = LowBitState(states=states, signed=signed, block=64)
    codes, scale = codec.encode(values)
    assert codes.shape == (3, 5, codec.code_columns(columns)) and codes.dtype == torch.uint8
    assert scale.shape == (3, 5, codec.scale_columns(columns))
    padded = nn.functional.pad(values.abs(), (0, -columns % 64)).unflatten(-1, (-1, 64)).amax(-1)
    bound = WORST[states, signed] * padded.repeat_interleave(64, -1)[..., :columns]
    assert ((codec.decode(codes, scale, columns) - values).abs() <= bound + 1e-13).all()


@pytest.mark.parametrize("states", FEW)
def test_a_step_is_torchaos(states: States) -> None:
    """Where rows are whole blocks both store the same blocks."""
    optim = pytest.importorskip("torchao.optim")
    other = {"8bit": optim.AdamW8bit, "4bit": optim.AdamW4bit, "fp8": optim.AdamWFp8}[states]
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.randn(16, 512, generator=torch.Generator().manual_seed(0))) for _ in range(2))
    mine, its = LowBitAdamW([ours], states=states, **options), other([theirs], **options)
    with torch.compiler.set_stance("force_eager"):
        for step in range(4):
            grad = torch.randn(16, 512, generator=torch.Generator().manual_seed(step))
            ours.grad, theirs.grad = grad.clone(), grad.clone()
            mine.step()
            its.step()
            state = its.state[theirs]["exp_avg"]
            codec = LowBitState(states=states, signed=True, block=BLOCKS[states])
            kept = mine.state[ours]
            stored = codec.decode(kept["exp_avg_codes"], kept["exp_avg_scale"], 512)
            gap = (stored - state.dequantize()).abs()
            # Sums that differ in the last bit may fall on two sides of a midpoint: a whole gap, on very few elements.
            assert (gap > TOL_FP32).float().mean() < 1e-3
            assert ((ours - theirs).abs() > TOL_FP32).float().mean() < 2e-3 * (step + 1)


def wide(states: States, dtype: str = "float32", *, mesh: str = "dp_shard=2 tp=2", **options: Any) -> Cell:
    policy = OptimizerPolicy(states=states, **options)
    return Cell(
        mesh=mesh,
        microbatches=2,
        hidden_mlp=160,
        vocab=131,  # uneven
        dtype=dtype,
        memory=mk.MemoryPolicy(optimizer=policy),
    )


def kept(cell: Cell) -> tuple[list[str], dict[str, Tensor], list[float]]:
    """(state of the embedding, whole parameters, losses) after a few clipped steps."""
    run = start(cell)
    optimizer = mk.adamw(run, lr=3e-3)
    losses = []
    for batch in batches(cell) * 6:
        losses.append(float(run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches)))
        mk.clip_grad_norm(run, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    first = next(iter(run.parameters()))
    return list(optimizer.state[first]), {name: full_tensor(p).clone() for name, p in run.named_parameters()}, losses


@cache
def fp32_losses() -> list[float]:
    losses: list[float] = pool(1).run(kept, wide("fp32", mesh="tp=1"))[0][2]
    return losses


@pytest.mark.parametrize("states", FEW)
def test_training_is_near_fp32_moments(states: States) -> None:
    exact = fp32_losses()
    keys, _, few = pool(1).run(kept, wide(states, mesh="tp=1"))[0]
    assert keys == ["step", "exp_avg_codes", "exp_avg_scale", "exp_avg_sq_codes", "exp_avg_sq_scale"]
    fallen = exact[0] - exact[-1]
    assert fallen > 0.3
    share = {"8bit": 0.02, "4bit": 0.15, "fp8": 0.05}[states]
    assert max(abs(a - b) for a, b in zip(exact, few, strict=True)) <= share * fallen


@pytest.mark.parametrize("states", thin(FEW, 3))
def test_a_checkpoint_continues_bit_for_bit_and_loads_onto_another_mesh(tmp_path: Path, states: States) -> None:
    cell = wide(states, "bfloat16", stochastic_rounding=True)
    saved, later = pool(4).run(save_half_way, str(tmp_path), cell)[0]
    for mesh in ("dp_shard=2 tp=2", "dp_replicate=2 tp=2"):
        loaded, resumed = pool(4).run(resume, str(tmp_path), replace(cell, mesh=mesh))[0]
        assert all(torch.equal(loaded[name], saved[name]) for name in saved) and loaded.keys() == saved.keys()
        if mesh == cell.mesh:
            assert all(torch.equal(resumed[name], later[name]) for name in later)


def test_a_checkpoint_of_other_states_or_other_blocks_is_refused(tmp_path: Path) -> None:
    cell = wide("8bit")
    pool(4).run(save_half_way, str(tmp_path), cell)
    other = pool(4).run(resume, str(tmp_path), wide("4bit"))[0]
    assert "was saved as '8bit', and this run's optimizer holds it as '4bit'" in other
    plain = pool(4).run(resume, str(tmp_path), wide("fp32"))[0]
    assert "was saved as '8bit', and this run's optimizer holds it as 'AdamW'" in plain
    blocks = pool(4).run(resume, str(tmp_path), wide("8bit", mesh="dp_shard=4"))[0]
    assert "_scale' of" in blocks and "how to shard it is not known" in blocks


def test_blocks_end_where_a_mesh_cuts_rows() -> None:
    assert block_of("8bit", columns=14336, row_parts=8) == 256
    assert block_of("4bit", columns=160, row_parts=2) == 16
    assert block_of("8bit", columns=100, row_parts=1) == 256
    assert block_of("8bit", columns=100, row_parts=2) is None


def cut_rows() -> str:
    run = start(replace(wide("8bit"), mesh="tp=2", hidden_mlp=140))
    try:
        mk.adamw(run, lr=1e-3)
    except mk.errors.PlanError as error:
        return str(error)
    return "no error"


def test_rows_cut_inside_of_a_block_are_refused() -> None:
    answer = pool(2).run(cut_rows)[0]
    assert "'layers.0.mlp.down_proj.weight', 140 elements, are cut in 2 parts" in answer


def test_a_state_dict_keeps_its_dtypes() -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(64, 80).bfloat16()) for _ in range(2)]
    optimizers = [LowBitAdamW([param]) for param in params]
    for step in range(4):
        if step == 2:
            optimizers[1].load_state_dict(optimizers[0].state_dict())
            params[1].data.copy_(params[0])
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = torch.randn(64, 80, generator=torch.Generator().manual_seed(step)).bfloat16()
            optimizer.step()
    assert optimizers[1].state[params[1]]["exp_avg_scale"].dtype == torch.float32
    assert torch.equal(params[0], params[1])


def test_an_update_in_chunks_is_one_update() -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(65, 80).bfloat16()) for _ in range(2)]
    params[1].data.copy_(params[0])
    for param, chunk in zip(params, (1 << 22, 700), strict=True):
        optimizer = LowBitAdamW([("weight", param)], stochastic_rounding=True)
        with mock.patch.object(rng, "CHUNK", chunk):
            for step in range(3):
                param.grad = torch.randn(65, 80, generator=torch.Generator().manual_seed(step)).bfloat16()
                optimizer.step()
    assert torch.equal(params[0], params[1])


@pytest.mark.parametrize("states", ["fp32", *FEW])
@pytest.mark.parametrize("rounding", [False, True])
def test_an_update_of_many_parameters_is_that_of_each_alone(states: States, rounding: bool) -> None:
    """Bit for bit, also where a chunk ends inside of a parameter."""
    torch.manual_seed(0)
    shapes = [(64, 80), (80,), (96, 80), (3, 40, 80), (70, 64), (64,), (), (0, 80)]
    together = {str(number): nn.Parameter(torch.randn(shape).bfloat16()) for number, shape in enumerate(shapes)}
    alone = {name: nn.Parameter(param.detach().clone()) for name, param in together.items()}
    options: dict[str, Any] = {"states": states, "stochastic_rounding": rounding}
    optimizers = [LowBitAdamW(list(together.items()), **options)]
    optimizers += [LowBitAdamW([named], **options) for named in alone.items()]
    with mock.patch.object(rng, "CHUNK", 9000):
        for _ in range(3):
            for name, param in together.items():
                param.grad = torch.randn(param.shape).bfloat16()
                alone[name].grad = param.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
    for name, param in together.items():
        assert torch.equal(param, alone[name]), name
