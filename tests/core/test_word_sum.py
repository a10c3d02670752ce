"""Sums of words depend on bytes alone, change with each bit, and are of many tensors what they are of each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from meshkit.core.word_sum import SMALL, word_sum, word_sums

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.bool, torch.complex64]


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)


def by_numpy(tensor: Tensor) -> int:
    """Whole words of eight bytes, and after them the elements that are left, as integers."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    raw, size = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), tensor.element_size()
    whole = len(raw) // 8 * 8
    left = np.frombuffer(raw[whole:], {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[size]).astype(np.int64)
    return int(np.frombuffer(raw[:whole], np.int64).sum() + left.sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (), (7,), (8,), (3, 5), (16, 8)])
def test_the_same_bytes_have_one_sum_wherever_they_lie_and_each_bit_counts(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    tensor = drawn(dtype, *shape)
    wanted = by_numpy(tensor)
    assert int(word_sum(tensor)) == wanted
    for offset in range(1, 4):  # a shard inside of a flat buffer of several
        storage = drawn(dtype, offset + tensor.numel())
        storage[offset:] = tensor.reshape(-1)
        assert int(word_sum(storage[offset:].view(shape))) == wanted, offset
    if dtype != torch.bool:
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        for byte in range(raw.size):
            raw[byte] ^= 1 << byte % 8
            assert int(word_sum(tensor)) != wanted, byte
            raw[byte] ^= 1 << byte % 8


def test_many_tensors_have_the_sums_of_each() -> None:
    torch.manual_seed(0)
    shapes = [(), (1,), (4,), (3,), (4,), (2, 2), (5, 3), (SMALL + 8,), (SMALL + 1,)]
    tensors = [drawn(dtype, *shape) for dtype in DTYPES for shape in shapes * 2]
    tensors.append(drawn(torch.float32, 8, 4).t())  # not contiguous
    assert [int(each) for each in word_sums(tensors)] == [by_numpy(tensor) for tensor in tensors]
    assert word_sums([]) == []
