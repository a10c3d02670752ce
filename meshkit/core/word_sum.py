"""Sum of the words of a tensor (checksum), which any flipped bit changes: at the speed of memory, on the tensor's device."""

from __future__ import annotations

import torch
from torch import Tensor


def word_sum(local: Tensor) -> Tensor:
    """Modulo 2^64, int64 []: the host does not wait for it."""
    flat = local.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.element_size()
    if not (flat.numel() * size) % 8 and not (flat.storage_offset() * size) % 8:
        return flat.view(torch.int64).sum()
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).sum(dtype=torch.int64)
