"""Quantized blocks against their definition, value by value, and the error that the reference states of each wire."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshkit.core.block_quantization import (
    BLOCK,
    BlockWire,
    dequantize_blocks,
    quantize_blocks,
    quantized_bytes,
    whole_blocks,
)

WIRES: list[BlockWire] = ["int8", "fp8", "int4"]
# Relative RMS error of Gaussian values in blocks of 128, measured: memory_comm, section 3.1; of e4m3 computed here.
RMS = {"int8": 0.0065, "fp8": 0.026, "int4": 0.118}


def levels(wire: BlockWire) -> Tensor:
    """Every value of a code, in order: whole numbers, or what e4m3 can say, by its definition of 4 and 3 bits."""
    if wire != "fp8":
        top = {"int8": 127, "int4": 7}[wire]
        return torch.arange(-top, top + 1, dtype=torch.float64)
    positive = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    positive += [
        (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(1, 16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)  # NaN
    ]
    return torch.tensor([*(-value for value in reversed(positive[1:])), *positive], dtype=torch.float64)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_value_becomes_the_nearest_level_times_the_scale_of_its_block(wire: BlockWire, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = (torch.randn(9, BLOCK, dtype=torch.float64) * 10.0 ** torch.arange(-4, 5).unsqueeze(1)).to(dtype)
    packed = quantize_blocks(values, wire)
    assert packed.dtype == torch.uint8
    assert packed.shape == (9, quantized_bytes(BLOCK, wire))
    found, known = dequantize_blocks(packed, wire, torch.float64), levels(wire)
    for row, back in zip(values.double(), found, strict=True):
        scale = float((row.abs().max() / known[-1]).float())
        distance = (row.unsqueeze(1) / scale - known).abs()
        # Half-way values may go either way after a rounding of the quotient in fp32.
        chosen = (back / scale).unsqueeze(1) - known
        assert float(chosen.abs().min(1).values.max()) < 1e-6 * float(known[-1])
        picked = chosen.abs().argmin(1)
        assert torch.all(
            distance.gather(1, picked.unsqueeze(1)).squeeze(1) <= distance.min(1).values + 1e-5 * known[-1]
        )


@pytest.mark.parametrize("wire", WIRES)
def test_the_error_of_gaussian_values_is_the_measured_one(wire: BlockWire) -> None:
    torch.manual_seed(1)
    values = torch.randn(4096, BLOCK)
    error = dequantize_blocks(quantize_blocks(values, wire), wire, torch.float32) - values
    assert float(error.square().mean().sqrt()) == pytest.approx(RMS[wire], rel=0.03)


@pytest.mark.parametrize("wire", WIRES)
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(wire: BlockWire) -> None:
    values = torch.zeros(3, BLOCK)
    values[1, 5], values[2, 7] = torch.nan, torch.inf
    back = dequantize_blocks(quantize_blocks(values, wire), wire, torch.float32)
    assert torch.equal(back[0], values[0])
    assert not back[1].isfinite().any()
    assert not back[2].isfinite().all()


def test_blocks_are_whole() -> None:
    assert [whole_blocks(size) for size in (0, 1, 128, 129)] == [0, 128, 128, 256]
    assert quantized_bytes(256, "int8") == quantized_bytes(256, "fp8") == 2 * 132
    assert quantized_bytes(256, "int4") == 2 * 68
