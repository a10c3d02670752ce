"""fp8 linear layers compose with the blocks and are refused where there is no fp8. The rounding is emulated here."""

from __future__ import annotations

import importlib.util
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import meshkit as mk
from meshkit.core import _torch
from meshkit.core._torch import TorchDispatchMode
from meshkit.core.sharding import full_tensor
from meshkit.memory import chosen_linears, plan_fp8
from meshkit.strategy import OptimizerOffload, OptimizerPolicy
from tests.laws.parity.cases import Cell, batches, build, own_rows, plan_of, reference, start
from tests.laws.parity.test_bytes import observe_step
from tests.optim.test_host_offload import resume, save_half_way
from tests.world import RankError, pool

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
FP8_RATIO = 1.5  # at most so many times the error of one device: parts of a tensor have scales of their own
CPU = torch.device("cpu")


def fp8(mesh: str, *, dtype: str = "float32", **options: object) -> Cell:
    precision = mk.strategy.Precision(fp8=mk.strategy.Fp8(emulate=True, **options))  # type: ignore[arg-type]  # the tests' own
    return Cell(mesh=mesh, dtype=dtype, hidden_mlp=64, heads=(8, 4), memory=mk.MemoryPolicy(precision=precision))


def gradients(cell: Cell) -> tuple[float, list[str]]:
    """(relative error of all first-step gradients against fp64 on one device, names of linear layers not in fp8)."""
    exact = reference(replace(cell, dtype="float64", memory=None))[2]
    run = start(cell)
    run.forward_backward(own_rows(batches(cell)[0], run.mesh))
    pairs = [(full_tensor(param.grad).double(), exact[name]) for name, param in run.named_parameters()]  # type: ignore[arg-type]
    error = sum(float((mine - its).square().sum()) for mine, its in pairs)
    scale = sum(float(its.square().sum()) for _, its in pairs)
    linears = {name: type(child).__mro__ for name, child in run.model.named_modules() if isinstance(child, nn.Linear)}
    others = [name for name, classes in linears.items() if all(base.__name__ != "Float8Linear" for base in classes)]
    return (error / scale) ** 0.5, others


@cache
def error_alone(recipe: str) -> float:
    error: float = pool(1).run(gradients, fp8("tp=1", recipe=recipe))[0][0]
    return error


@needs_torchao
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp_shard=2", {}),
        ("dp_shard=2", {"gather": True}),
        ("tp=2", {}),
        ("dp_shard=2", {"recipe": "rowwise"}),
    ],
    ids=str,
)
def test_gradients_are_near_those_of_one_device_and_not_the_same(mesh: str, options: dict[str, object]) -> None:
    narrow = [f"layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "kv"]  # 8 features a rank
    alone = error_alone(str(options.get("recipe", "tensorwise")))
    assert alone < 0.4
    for error, others in pool(2).run(gradients, fp8(mesh, **options)):
        assert others == (["lm_head"] if mesh != "tp=2" else [*narrow, "lm_head"])
        assert 0.1 < error <= FP8_RATIO * alone  # bf16: 0.035


@needs_torchao
@pytest.mark.parametrize("gather", [False, True])
def test_a_checkpoint_goes_on_and_knows_nothing_of_fp8(tmp_path: Path, gather: bool) -> None:
    cell = fp8("dp_shard=2", gather=gather)
    saved, later = pool(2).run(save_half_way, str(tmp_path), cell)[0]
    loaded, resumed = pool(2).run(resume, str(tmp_path), cell)[0]
    assert all(torch.equal(resumed[name], later[name]) for name in later)
    plain, _ = pool(2).run(
        resume, str(tmp_path), replace(cell, memory=mk.MemoryPolicy(precision=mk.strategy.Precision()))
    )[0]
    assert all(torch.equal(plain[name], saved[name]) and torch.equal(loaded[name], saved[name]) for name in saved)


def scales_of_steps(cell: Cell, shared: bool) -> tuple[list[Tensor], list[int]]:
    """(parameters after two steps; bytes of each all-reduce of maxima in the second step)."""
    run = start(cell)
    optimizer = mk.adamw(run, lr=1e-2)
    seen: list[int] = []
    reduced = torch.ops.c10d.allreduce_.default

    class Maxima(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            name = func.name()
            if name.startswith("_c10d_functional::all_reduce") and args[1] == "max":
                seen.append(args[0].nbytes)
            elif func is reduced and args[0][0].numel() == 14:  # no other message has so many
                seen.append(args[0][0].nbytes)
            return func(*args, **(kwargs or {}))

    without = mock.patch("meshkit.step._run.shared_scales", lambda model: nullcontext())
    with nullcontext() if shared else without:
        for batch in batches(cell)[:2]:
            seen.clear()
            with Maxima():
                run.forward_backward(own_rows(batch, run.mesh), microbatches=2)
            optimizer.step()
            optimizer.zero_grad()
    weights = [_torch.shard_object(param) for param in run.parameters()]  # type: ignore[arg-type]  # all are DTensors
    assert all(getattr(weight, "_precomputed_scale", None) is None for weight in weights)  # stale after the step
    return [getattr(weight, "_tensor", weight).detach().clone() for weight in weights], list(seen)


@needs_torchao
def test_the_scales_of_all_weights_of_a_step_are_one_all_reduce() -> None:
    """Bit for bit the same parameters as with one for each weight and gather. 14 layers are in fp8."""
    cell = fp8("dp_shard=2", gather=True)
    for (mine, shared), (theirs, apart) in zip(
        pool(2).run(scales_of_steps, cell, True), pool(2).run(scales_of_steps, cell, False), strict=True
    ):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
        assert shared == [14 * 4]
        assert len(apart) > 2 * 14 and set(apart) == {4}


@needs_torchao
@pytest.mark.parametrize("mesh", ["dp_shard=2", "cp=2", "dp_replicate=2", "dp_replicate=2 dp_shard=2"])
@pytest.mark.parametrize("gather", [False, True])
def test_weights_in_fp8_and_their_scales_are_explained_byte_by_byte(mesh: str, gather: bool) -> None:
    cell = fp8(mesh, gather=gather)
    ranks = mk.MeshSpec.parse(mesh).world_size
    for seen, said in pool(ranks).run(observe_step, replace(cell, microbatches=2)):
        assert seen - said == Counter(), "sent, but not explained"
        assert said - seen == Counter(), "explained, but not sent"
        scales = [message for message in said if message.op == "all_reduce" and message.size == 14 * 4]
        assert len(scales) == (gather and mesh != "dp_replicate=2")


def test_layers_in_blocks_whose_dims_are_multiples_of_16_are_chosen() -> None:
    model = build(Cell(mesh="", hidden_mlp=48, heads=(8, 2), layers=1))  # k and v: 8 features
    blocks = ["layers.0"]
    whole = chosen_linears(model, blocks=blocks, tp=1)
    attention = ["layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj"]
    assert whole == [*attention, *(f"layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))]
    assert chosen_linears(model, blocks=blocks, tp=2) == attention


def test_hardware_without_fp8_is_refused_with_the_reason() -> None:
    with pytest.raises(mk.errors.PlanError, match="need an NVIDIA GPU of compute capability 8.9, and cpu is none"):
        plan_fp8(nn.Linear(16, 16), blocks=[""], policy=mk.strategy.Fp8(), device_type="cpu")
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_capability", lambda: (8, 9)),
        pytest.raises(mk.errors.PlanError, match="compute capability 9.0, and cuda has compute capability 8.9"),
    ):
        plan_fp8(nn.Linear(16, 16), blocks=[""], policy=mk.strategy.Fp8(recipe="rowwise"), device_type="cuda")


def test_without_torchao_the_extra_is_named() -> None:
    with (
        mock.patch.dict("sys.modules", {"torchao": None, "torchao.float8": None}),
        pytest.raises(
            mk.errors.PlanError, match=r"needs torchao, which is not installed. Run: pip install 'meshkit\[torchao\]'"
        ),
    ):
        plan_fp8(nn.Linear(16, 16), blocks=[""], policy=mk.strategy.Fp8(emulate=True), device_type="cpu")


@needs_torchao
def test_a_model_without_a_layer_that_fits_is_refused() -> None:
    with pytest.raises(mk.errors.PlanError, match="no linear layer of the blocks has dims that are multiples of 16"):
        plan_fp8(
            build(Cell(mesh="")), blocks=["layers.0"], policy=mk.strategy.Fp8(emulate=True), device_type="cpu", tp=64
        )


@needs_torchao
def test_a_gather_in_fp8_of_unequal_shards_is_refused() -> None:
    """It ended ranks in native code."""
    cell = fp8("dp_shard=3", gather=True)
    with pytest.raises(
        mk.errors.PlanError, match=r"rows of 'layers.0.self_attn.q_proj' are no multiple of the 3 ranks"
    ):
        mk.preflight.explain.explain(
            build(cell), cell.mesh, plan=plan_of(cell), memory=cell.memory, rows=1, seq_len=16, device="cpu"
        )


def refused(cell: Cell) -> Tensor:
    start(cell)
    raise AssertionError("not refused")


@pytest.mark.parametrize(
    ("cell", "match"),
    [
        (fp8("pp=2"), "with pp=2: schedules that compute weights' gradients apart"),
        (fp8("tp=2", gather=True), "with tp=2: a weight that is split twice"),
    ],
    ids=str,
)
def test_what_does_not_compose_is_refused(cell: Cell, match: str) -> None:
    with pytest.raises(RankError, match=match):
        pool(2).run(refused, cell)


def test_gather_with_masters_on_the_host_is_refused() -> None:
    cell = fp8("dp_shard=2", gather=True)
    assert cell.memory is not None
    memory = replace(cell.memory, optimizer=OptimizerPolicy(offload=OptimizerOffload()))
    with pytest.raises(RankError, match="with an optimizer on the host"):
        pool(2).run(refused, replace(cell, memory=memory))


def test_rowwise_scales_cannot_be_gathered() -> None:
    with pytest.raises(mk.errors.PlanError, match="recipe='rowwise', gather=True"):
        mk.strategy.Fp8(recipe="rowwise", gather=True)
