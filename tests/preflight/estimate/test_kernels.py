"""In an estimate other kernels stand for torch's: of tensors without values only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshkit.core._torch import FakeTensorMode, TorchDispatchMode
from meshkit.preflight.estimate._kernels import cuda_kernels


def test_tensors_with_values_are_computed() -> None:
    """A model that is tried on values while it is estimated read memory that nobody had written."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 8, 16, generator=generator)
    half = x.to(torch.bfloat16)
    norm, attended = F.rms_norm(x, (16,)), F.scaled_dot_product_attention(half, half, half, is_causal=True)
    with cuda_kernels(attention=True):
        assert torch.equal(F.rms_norm(x, (16,)), norm)
        assert torch.equal(F.scaled_dot_product_attention(half, half, half, is_causal=True), attended)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_whose_values_have_another_size_write_no_scores(dtype: torch.dtype) -> None:
    """As of DeepSeek's attention: CUDA's efficient kernel takes them, a CPU writes out all scores."""
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple) else (out,):
                if isinstance(each, torch.Tensor):
                    largest = max(largest, each.numel())
            return out

    with FakeTensorMode(), cuda_kernels(attention=True):
        q, k = (torch.empty(2, 4, 512, 24, dtype=dtype, requires_grad=True) for _ in "qk")
        v = torch.empty(2, 4, 512, 16, dtype=dtype, requires_grad=True)
        with Largest():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out.backward(torch.empty_like(out))
    assert out.shape == v.shape and out.dtype == dtype
    assert all(each.grad is not None and each.grad.shape == each.shape for each in (q, k, v))
    assert largest == q.numel() < 2 * 4 * 512 * 512


def test_rows_without_heads_are_attended_as_torch_does() -> None:
    """No fused kernel of torch's takes three dims."""
    with FakeTensorMode(), cuda_kernels(attention=True):
        for width in (24, 16):
            q, v = (torch.empty(2, 32, size, dtype=torch.bfloat16) for size in (24, width))
            assert F.scaled_dot_product_attention(q, q, v, is_causal=True).shape == v.shape
