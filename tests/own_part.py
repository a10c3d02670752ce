"""A tensor on a mesh held against the whole one it should be: each rank looks at its own part, and nothing is sent.

So copies that differ between ranks show as well, and a comparison costs no collective. Every rank must be asked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshkit.sharding import local_slices, local_tensor


def difference(value: Tensor | None, expected: Tensor) -> float:
    """The largest absolute difference of this rank's part; 0 where it holds nothing."""
    assert value is not None
    assert value.shape == expected.shape
    own, wanted = local_tensor(value), expected.detach()[local_slices(value)]
    assert own.shape == wanted.shape
    return float((own.to(wanted.dtype) - wanted).abs().max()) if own.numel() else 0.0


def same_bits(value: Tensor, expected: Tensor) -> bool:
    return value.shape == expected.shape and torch.equal(local_tensor(value), expected.detach()[local_slices(value)])
