"""The kernels of other devices, as far as a machine without one can tell: calls that fit, and the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import meshkit as mk
from meshkit.core import attention_kernels as kernels
from meshkit.core._torch import FakeTensorMode
from meshkit.core.attention_tiles import ANTI, CAUSAL, FULL, Tile

TOL_FP64_SUM = 1e-12  # only the order of summation differs

heads = pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 4), (8, 2), (6, 1)])


def heads_first(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """[B, heads, T, D] that lies in memory as [B, T, heads, D], like everything the kernels are given."""
    batch, count, tokens, head_dim = shape
    return torch.randn(batch, tokens, count, head_dim, dtype=dtype, device=device).transpose(1, 2)


# ------------------------------------------------------------------------------------------------ shapes on a fake CUDA


@heads
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_the_cuda_flash_kernel_takes_our_arguments(query_heads, kv_heads, dtype, causal) -> None:
    queries, keys = (24, 24) if causal else (24, 40)
    with FakeTensorMode():
        q = heads_first(2, query_heads, queries, 64, dtype=dtype, device="cuda")
        k, v = (heads_first(2, kv_heads, keys, 64, dtype=dtype, device="cuda") for _ in range(2))
        out, lse = kernels.CUDA_FLASH.forward(q, k, v, causal, 0.125)
        assert (out.shape, out.dtype, out.device.type) == (q.shape, dtype, "cuda")
        assert (lse.shape, lse.dtype) == ((2, query_heads, queries), torch.float32)
        grads = kernels.CUDA_FLASH.backward(torch.empty_like(out), q, k, v, out, lse, causal, 0.125)
        for grad, x in zip(grads, (q, k, v), strict=True):
            assert (grad.shape, grad.dtype, grad.device.type) == (x.shape, dtype, "cuda")


@heads
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [FULL, CAUSAL, ANTI])
def test_tiles_on_cuda_add_up_in_the_accumulator(query_heads, kv_heads, dtype, kind) -> None:
    """`Forward` and `Backward` as a exchange uses them, with a tile inside of the tensors at hand."""
    with FakeTensorMode():
        q, dout = (torch.randn(2, 24, query_heads, 64, dtype=dtype, device="cuda") for _ in range(2))
        k, v = (torch.randn(2, 40, kv_heads, 64, dtype=dtype, device="cuda") for _ in range(2))
        tile = Tile(3, 19, 8, 24 if kind != FULL else 37, kind)
        running = kernels.Forward(q, 0.125)
        running.add(k, v, [tile])
        assert (running.out.shape, running.out.dtype) == (q.shape, torch.float32)
        assert (running.lse.shape, running.lse.dtype) == (q.shape[:-1], torch.float32)
        back = kernels.Backward(dout, q, running.out.to(dtype), running.lse, 0.125)
        dk, dv = (torch.zeros(k.shape, device="cuda") for _ in range(2))
        back.add(k, v, [tile], dk, dv)
        assert (back.dq.shape, back.dq.dtype) == (q.shape, torch.float32)


def test_each_kind_of_tensor_has_its_kernel() -> None:
    assert kernels.kernel_for("cpu", torch.bfloat16, 7) is kernels.CPU_FLASH
    assert kernels.kernel_for("cuda", torch.bfloat16, 64) is kernels.CUDA_FLASH
    assert kernels.kernel_for("cuda", torch.float16, 256) is kernels.CUDA_FLASH
    assert kernels.kernel_for("cuda", torch.float32, 7) is kernels.MATH
    assert kernels.kernel_for("cuda", torch.float64, 512) is kernels.MATH


@pytest.mark.parametrize("head_dim", [12, 264])
def test_a_head_dim_without_a_kernel_is_refused(head_dim: int) -> None:
    text = (
        "attention: the flash kernel on cuda needs a head_dim that 8 divides, up to 256, but it is "
        f"{head_dim}. Use such a head_dim, or fp32."
    )
    with pytest.raises(mk.errors.PlanError, match=text):
        kernels.kernel_for("cuda", torch.bfloat16, head_dim)


# -------------------------------------------------------------------------------------------------- numbers, on the CPU


@heads
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [7, 512])
def test_the_math_kernel_equals_the_flash_kernel(query_heads, kv_heads, causal, rows, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "MATH_ROWS", rows)
    torch.manual_seed(0)
    queries, keys = (24, 24) if causal else (24, 40)
    q, dout = (heads_first(2, query_heads, queries, 8, dtype=torch.float64, device="cpu") for _ in range(2))
    k, v = (heads_first(2, kv_heads, keys, 8, dtype=torch.float64, device="cpu") for _ in range(2))
    found, expected = [], []
    for kernel, results in ((kernels.MATH, found), (kernels.CPU_FLASH, expected)):
        out, lse = kernel.forward(q, k, v, causal, 0.3)
        results += [out, lse, *kernel.backward(dout, q, k, v, out, lse, causal, 0.3)]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        assert torch.allclose(mine, theirs, rtol=0, atol=TOL_FP64_SUM)


@heads
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["MATH", "CPU_FLASH"])
def test_a_kernel_equals_attention_written_out(query_heads, kv_heads, causal, name) -> None:
    kernel = getattr(kernels, name)
    torch.manual_seed(0)
    queries, keys = (24, 24) if causal else (24, 40)
    q, dout = (heads_first(2, query_heads, queries, 8, dtype=torch.float64, device="cpu") for _ in range(2))
    k, v = (heads_first(2, kv_heads, keys, 8, dtype=torch.float64, device="cpu") for _ in range(2))
    for x in (q, k, v):
        x.requires_grad_()
    shown = torch.ones(queries, keys, dtype=torch.bool)
    shown = shown.tril() if causal else shown
    wide = [x.repeat_interleave(query_heads // kv_heads, 1) for x in (k, v)]
    scores = (q @ wide[0].mT * 0.3).masked_fill(~shown, float("-inf"))
    expected = scores.softmax(-1) @ wide[1]
    out, lse = kernel.forward(q.detach(), k.detach(), v.detach(), causal, 0.3)
    assert torch.allclose(lse, scores.logsumexp(-1), rtol=0, atol=TOL_FP64_SUM)
    assert torch.allclose(out, expected, rtol=0, atol=TOL_FP64_SUM)
    found = kernel.backward(dout, q.detach(), k.detach(), v.detach(), out, lse, causal, 0.3)
    for mine, theirs in zip(found, torch.autograd.grad(expected, (q, k, v), dout), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=TOL_FP64_SUM)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rank_without_heads_calls_no_kernel(dtype: torch.dtype) -> None:
    """Ulysses with fewer heads than ranks. The kernels divide by the number of heads, some of them fatally."""
    with FakeTensorMode():
        none = torch.zeros(1, 4, 0, 64, dtype=dtype, device="cuda")
        running = kernels.Forward(none, 0.3)
        running.add(none, none, [Tile(0, 4, 0, 4, CAUSAL)])
        back = kernels.Backward(none, none, none, running.lse, 0.3)
        sums = torch.zeros(1, 4, 0, 64, device="cuda")
        back.add(none, none, [Tile(0, 4, 0, 4, CAUSAL)], sums, sums)
        assert (running.out.shape, back.dq.shape) == (none.shape, none.shape)
