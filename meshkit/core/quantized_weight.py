"""Quantized frozen weights (QLoRA's NF4, int8): each block of a row as its codes, then its scale, in one tensor of bytes.

| codes | levels                                            | bytes of a block of n |
|-------|---------------------------------------------------|-----------------------|
| nf4   | 16 quantiles of a normal distribution, 0 included | n / 2 + 4             |
| int8  | -127 to 127, even steps                           | n + 4                 |

The bytes [out, bytes of a row] take the weight's place under its name, and are sharded, gathered, saved and moved as any
other parameter. Rows are split between blocks only, so a weight has the same codes on every mesh.
Source: Dettmers et al. 2023 (QLoRA, arXiv 2305.14314), section 3; blocks with their scales inside as in GGUF.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from meshkit.core.custom_op import custom_op
from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError

Codes = Literal["nf4", "int8"]

SCALE_BYTES = 4  # fp32
SMALLEST_SCALE = 1e-30  # of a block of zeros
INT8_MAX = 127
CHUNK = 1 << 22  # elements decoded at a time: bounds the fp32 scratch beside the weight itself
NF4_OFFSET = 0.9677083  # where the outermost quantiles are taken; QLoRA's choice


def _nf4_levels() -> tuple[float, ...]:
    """The values of the codes, ascending, from -1 to 1: quantiles with 0 among them, one more above it than below.

    Source: QLoRA, section 3, as bitsandbytes' `create_normal_map` computes it.
    """
    quantile = NormalDist().inv_cdf

    def side(count: int) -> list[float]:
        step = (NF4_OFFSET - 0.5) / count
        return [quantile(NF4_OFFSET - index * step) for index in range(count)]

    above, below = side(8), side(7)
    return tuple(sorted(value / above[0] for value in [*above, 0.0, *(-value for value in below)]))


NF4_LEVELS = _nf4_levels()


@dataclass(frozen=True, kw_only=True)
class BlockCodes:
    """How weights are encoded. block: elements of a row that share a scale; the last block of a row may be padded."""

    codes: Codes
    block: int

    def __post_init__(self) -> None:
        if self.codes not in get_args(Codes):
            raise PlanError(f"base={self.codes!r} is not known. Choose one of {', '.join(get_args(Codes))}, or None.")
        if self.block < 2 or self.block % 2:
            raise PlanError(f"base_block={self.block}: a block is an even number of elements, such as 64.")

    @property
    def block_bytes(self) -> int:
        return (self.block // 2 if self.codes == "nf4" else self.block) + SCALE_BYTES

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` columns, padding included."""
        return -(-columns // self.block) * self.block_bytes

    def columns(self, row_bytes: int) -> int:
        """Columns of a row of `row_bytes` bytes, padding included."""
        return row_bytes // self.block_bytes * self.block

    def encode(self, values: Tensor) -> Tensor:
        """values: [..., C] -> [..., row_bytes(C)] uint8. Ties go to the lower code, as in bitsandbytes."""
        if values.is_meta:
            return values.new_empty((*values.shape[:-1], self.row_bytes(values.shape[-1])), dtype=torch.uint8)
        padding = -values.shape[-1] % self.block
        blocks = rearrange(F.pad(values.float(), (0, padding)), "... (blocks n) -> ... blocks n", n=self.block)
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_SCALE)
        if self.codes == "int8":
            codes = (blocks * (INT8_MAX / scale)).round().to(torch.int8).view(torch.uint8)
        else:
            levels = torch.tensor(NF4_LEVELS, device=values.device)
            codes = torch.bucketize(blocks / scale, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
            codes = codes[..., 0::2] << 4 | codes[..., 1::2]  # two to a byte, the first in the high bits
        return rearrange(torch.cat([codes, scale.view(torch.uint8)], -1), "... blocks bytes -> ... (blocks bytes)")

    def decode(self, packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """The values, [..., columns]: level times scale in fp32, rounded once to `dtype`."""
        out: Tensor = _decode(packed, self.codes, self.block, columns, dtype)
        return out

    def levels(self, codes: Tensor) -> Tensor:
        """What codes stand for, before the scale: [..., bytes] -> [..., block] fp32."""
        if self.codes == "int8":
            return codes.contiguous().view(torch.int8).float() / INT8_MAX
        levels = torch.tensor(NF4_LEVELS, device=codes.device)
        pairs = torch.stack(
            [levels.repeat_interleave(16), levels.repeat(16)], -1
        )  # [256, 2]: both values of every byte
        return rearrange(pairs[codes.int()], "... bytes pair -> ... (bytes pair)")


def _fake_decode(packed: Tensor, codes: str, block: int, columns: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((*packed.shape[:-1], columns), dtype=dtype)


@custom_op("decode_few_bits", fake=_fake_decode)
def _decode(packed: Tensor, codes: str, block: int, columns: int, dtype: torch.dtype) -> Tensor:
    """See `BlockCodes.decode`. An operator, since compiled graphs would trace the loop again for every layer."""
    encoding = BlockCodes(codes=codes, block=block)  # type: ignore[arg-type]  # one that was checked before
    rows = rearrange(packed, "... bytes -> (...) bytes")
    out = packed.new_empty((len(rows), columns), dtype=dtype)
    step = max(1, CHUNK // max(1, columns))
    for first in range(0, len(rows), step):
        blocks = rearrange(rows[first : first + step], "rows (blocks n) -> rows blocks n", n=encoding.block_bytes)
        block_codes, scale = blocks.split([encoding.block_bytes - SCALE_BYTES, SCALE_BYTES], -1)
        # The scale's four bytes, put next to each other, are read as one fp32: a view of another dtype needs them contiguous.
        values = encoding.levels(block_codes) * scale.contiguous().view(torch.float32)
        out[first : first + step] = rearrange(values, "rows blocks n -> rows (blocks n)")[:, :columns]
    return out.view(*packed.shape[:-1], columns)


def quantized_linear(linear: nn.Linear, codes: BlockCodes) -> None:
    """Hold the layer's weight as codes, in place, frozen. It computes with the decoded weight, in its input's dtype.

    Forward and backward decode it for their product and keep none of it.
    """
    linear._parameters["weight"] = nn.Parameter(codes.encode(linear.weight.detach()), requires_grad=False)
    patch_class(linear, forward=_forward, _meshkit_codes=codes)


def decode_linear(linear: nn.Linear, dtype: torch.dtype) -> None:
    """Hold the decoded weight instead of its codes, in place."""
    codes = codes_of(linear)
    assert codes is not None
    weight = codes.decode(linear.weight.detach(), linear.in_features, dtype)
    linear._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    patch_class(linear, forward=nn.Linear.forward, _meshkit_codes=None)


def codes_of(module: nn.Module) -> BlockCodes | None:
    """How the module's weight is encoded; None for one that is not quantized."""
    codes: BlockCodes | None = getattr(type(module), "_meshkit_codes", None)
    return codes


def product(linear: nn.Linear, input: Tensor) -> Tensor:
    """The linear layer without its bias, quantized or not."""
    codes = codes_of(linear)
    if codes is None:
        return F.linear(input, linear.weight)
    own_columns = linear.__dict__.get("own_columns")  # tensor parallelism's: see `_weight`
    out: Tensor = _Product.apply(input, linear.weight, codes, linear.in_features, own_columns)
    return out


def _forward(self: Any, input: Tensor) -> Tensor:
    out = product(self, input)
    return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, codes: BlockCodes, columns: int, own_columns: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.codes, ctx.columns, ctx.own_columns = codes, columns, own_columns
        return F.linear(x, _weight(packed, codes, columns, own_columns, x.dtype))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None, None]:
        (packed,) = ctx.saved_tensors
        return dout @ _weight(packed, ctx.codes, ctx.columns, ctx.own_columns, dout.dtype), None, None, None, None


def _weight(packed: Tensor, codes: BlockCodes, columns: int, own_columns: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The decoded weight [out, in] of this rank.

    own_columns: those it computes with. `packed` holds all columns where key/value heads are stored on every rank.
    """
    local_columns = min(columns, codes.columns(packed.shape[-1]))
    weight = codes.decode(packed, local_columns, dtype)
    if own_columns is None or len(own_columns) == local_columns:
        return weight
    return weight.index_select(1, own_columns.to(weight.device))
