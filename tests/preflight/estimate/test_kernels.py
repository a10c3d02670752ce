"""In an estimate other kernels stand for torch's: of tensors without values only."""

from __future__ import annotations

import torch
import torch.nn.functional as F

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
