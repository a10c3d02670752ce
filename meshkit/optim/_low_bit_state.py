"""Low-bit optimizer state (8-bit Adam): moments as codes, with one fp32 scale for every block of a row.

| states | levels                                    | block | bytes of one moment                 |
|--------|-------------------------------------------|-------|-------------------------------------|
| 8bit   | 256, dense near 0 (Dettmers et al. 2022)  | 256   | 1 + 4/256                           |
| 4bit   | 16, dense near 0; second moment: linear   | 128   | 1/2 + 4/128, two codes in a byte    |
| fp8    | those of e4m3                             | 256   | 1 + 4/256                           |

Blocks run along the last dim of the **whole** tensor, not of a rank's part flattened: codes and scales are then sharded as
the parameter is, and a checkpoint loads onto another mesh bit for bit. A plan that splits rows must split them between
blocks, which take a smaller size for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from einops import rearrange, reduce
from torch import Tensor

from meshkit.core import _torch
from meshkit.strategy import States

BLOCKS: dict[States, int] = {"8bit": 256, "4bit": 128, "fp8": 256}
SMALLEST_BLOCK = 16
# A block of zeros is divided by its scale too.
SMALLEST_SCALE = 1e-12
E4M3_MAX = 448.0


@cache
def levels(states: States, signed: bool) -> tuple[float, ...]:
    """The values of all codes, ascending; the largest is 1."""
    if states == "4bit" and not signed:
        return tuple((torch.arange(1, 17) / 16).tolist())  # no zero: a second moment of 0 would divide by nothing
    return dynamic_levels(signed=signed, exponents=3 if states == "4bit" else 7, bits=4 if states == "4bit" else 8)


def dynamic_levels(*, signed: bool, exponents: int, bits: int) -> tuple[float, ...]:
    """Decades from 1 downwards, each split in half as many steps as the one above it, of both signs; 0 and 1.

    Source: Dettmers 2016 (arXiv 1511.04561), Dettmers et al. 2022.
    """
    fraction_bits = bits - 1 - exponents if signed else bits - exponents
    values = [0.0, 1.0]
    for decade in range(exponents):
        steps = 2 ** (decade + fraction_bits)
        edges = torch.linspace(0.1, 1, steps + 1)
        means = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - exponents + 1)).tolist()
        values += means + ([-mean for mean in means] if signed else [])
    return tuple(sorted(values))


@dataclass(frozen=True, kw_only=True)
class LowBitState:
    """How one moment of one parameter is stored. signed: whether values have a sign. block: elements that share a scale."""

    states: States
    signed: bool
    block: int

    def code_columns(self, columns: int) -> int:
        return -(-columns // 2) if self.states == "4bit" else columns

    def scale_columns(self, columns: int) -> int:
        return -(-columns // self.block)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """values: [..., C] fp32 -> (codes [..., code_columns(C)] uint8, scales [..., scale_columns(C)] fp32)."""
        columns = values.shape[-1]
        blocks = self.scale_columns(columns)
        left = blocks * self.block - columns
        padded = torch.nn.functional.pad(values, (0, left)) if left else values
        largest = reduce(padded.abs(), "... (block c) -> ... block", "max", c=self.block).clamp_(min=SMALLEST_SCALE)
        # The largest element of a block becomes 448, the largest e4m3 number; rounding of the quotient may exceed it,
        # and to() would then give NaN: hence the clamp.
        if self.states == "fp8":
            scale = largest / E4M3_MAX
            codes = self._by_block(torch.div, values, scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            return codes.view(torch.uint8), scale
        # The nearest level, by the midpoints between levels.
        _, between = self._levels(values)
        scaled = self._by_block(torch.div, values, largest)
        codes = torch.bucketize(scaled, between, out_int32=True, right=True).to(torch.uint8)
        if self.states == "4bit":
            codes = torch.nn.functional.pad(codes, (0, columns % 2))
            # Two codes in a byte: the even column in the upper four bits.
            codes = codes[..., 0::2] << 4 | codes[..., 1::2]
        return codes, largest

    def decode(self, codes: Tensor, scale: Tensor, columns: int) -> Tensor:
        """The values, [..., C] fp32."""
        if self.states == "fp8":
            return self._by_block(torch.mul, codes.view(torch.float8_e4m3fn).float(), scale)
        if self.states == "4bit":
            codes = rearrange([codes >> 4, codes & 15], "nibble ... c -> ... (c nibble)")[..., :columns]
        known, _ = self._levels(codes)
        return self._by_block(torch.mul, known[codes.int()], scale)

    def _levels(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(levels, midpoints between them) on the device of `like`."""
        # Those without values, of an estimate, are not kept for runs.
        make = _levels_on.__wrapped__ if _torch.is_fake(like) else _levels_on
        return make(self.states, self.signed, like.device)

    def _by_block(self, operator: Callable[[Tensor, Tensor], Tensor], values: Tensor, scale: Tensor) -> Tensor:
        """The operator of each value and its block's scale."""
        if values.shape[-1] % self.block:
            return operator(values, scale.repeat_interleave(self.block, -1)[..., : values.shape[-1]])
        return operator(values.unflatten(-1, (-1, self.block)), scale.unsqueeze(-1)).flatten(-2)


@cache
def _levels_on(states: States, signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    known = torch.tensor(levels(states, signed), device=device)
    return known, (known[1:] + known[:-1]) / 2


def block_of(states: States, *, columns: int, row_parts: int) -> int | None:
    """Elements of a block if rows of the full tensor are sharded in `row_parts`; None if no block size divides a shard."""
    if row_parts == 1:
        return BLOCKS[states]
    # DTensor's Shard: every part but the last has this length, so all cuts are at its multiples.
    part_columns = -(-columns // row_parts)
    block = BLOCKS[states]
    while block >= SMALLEST_BLOCK:
        if part_columns % block == 0:
            return block
        block //= 2
    return None
