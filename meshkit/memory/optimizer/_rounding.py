"""bf16 parameters that are rounded up or down at random, so that on average nothing is lost."""

from __future__ import annotations

import torch
from torch import Tensor

_UPPER_HALF = -0x10000


def round_stochastically(values: Tensor, random: Tensor) -> Tensor:
    """values: fp32; random: integers in [0, 2^16), same shape. Returns bf16 whose mean over `random` is the value.

    Away from zero with probability (lower 16 bits) / 2^16: adding the random bits carries into the upper half that often.
    """
    bits = values.contiguous().view(torch.int32) + random.to(torch.int32)
    return (bits & _UPPER_HALF).view(torch.float32).to(torch.bfloat16)
