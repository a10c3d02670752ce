"""Block quantization of what travels (int8, fp8, int4): symmetric codes, one fp32 scale for each block.

| wire | levels                               | bytes of a block of 128 |
|------|--------------------------------------|-------------------------|
| int8 | -127 to 127, in even steps           | 128 + 4                 |
| fp8  | -448 to 448, of float8_e4m3fn        | 128 + 4                 |
| int4 | -7 to 7, in even steps               | 64 + 4                  |

A block of 128 is where the error has stopped to fall for int8 and int4 both, of Gaussian values and of those with outliers.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

BlockWire = Literal["int8", "fp8", "int4"]

BLOCK = 128
SCALE_BYTES = 4
LEVELS: dict[BlockWire, int] = {"int8": 127, "fp8": 448, "int4": 7}


def whole_blocks(elements: int) -> int:
    """Elements with what pads the last block."""
    return -(-elements // BLOCK) * BLOCK


def quantized_bytes(elements: int, wire: BlockWire) -> int:
    """elements: whole blocks."""
    return elements // BLOCK * (BLOCK * (4 if wire == "int4" else 8) // 8 + SCALE_BYTES)


def quantize_blocks(values: Tensor, wire: BlockWire) -> Tensor:
    """values: [N, 128] floats. Returns uint8 [N, bytes of a block]: codes, then the scale.

    A block with a NaN comes back as NaN, one with an infinity not finite.
    """
    levels = LEVELS[wire]
    scale = (values.abs().amax(dim=1, keepdim=True) / levels).float()
    scaled = (values / torch.where(scale == 0, 1, scale)).clamp_(-levels, levels).nan_to_num_(nan=0.0)
    if wire == "fp8":
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = scaled.round_().to(torch.int8)
        if wire == "int4":  # the first half of a block in the low bits, the second in the high ones
            low, high = (codes + (levels + 1)).view(torch.uint8).chunk(2, dim=1)
            codes = (high << 4).bitwise_or_(low)
    return torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)], dim=1)


def dequantize_blocks(packed: Tensor, wire: BlockWire, dtype: torch.dtype) -> Tensor:
    """packed: uint8 [N, bytes of a block]. Returns [N, 128]."""
    codes, scale = packed[:, :-SCALE_BYTES], packed[:, -SCALE_BYTES:].contiguous().view(torch.float32)
    values = packed.new_empty((len(packed), BLOCK), dtype=dtype)
    if wire == "int4":
        low, high = values.chunk(2, dim=1)
        low.copy_(codes & 15)
        high.copy_(codes >> 4)
        values -= LEVELS[wire] + 1
    elif wire == "fp8":
        values.copy_(codes.contiguous().view(torch.float8_e4m3fn))
    else:
        values.copy_(codes.view(torch.int8))
    return values.mul_(scale.to(dtype))
