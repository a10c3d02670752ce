"""Layout (sharding map): which rank holds which part of each tensor, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from meshkit.core.reshard._region import Region, volume


@dataclass(frozen=True)
class TensorRegions:
    """The layout of one tensor. regions: rank of the world -> the part it holds; ranks without a part are absent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: Mapping[int, Region]


@dataclass(frozen=True)
class Layout:
    """Parameters and persistent buffers by single-device name, tied ones once. ranks: those of the world with the model."""

    tensors: Mapping[str, TensorRegions]
    ranks: tuple[int, ...]

    def bytes_of(self, rank: int) -> int:
        """Bytes that the rank holds."""
        return sum(
            volume(tensor.regions[rank]) * tensor.dtype.itemsize
            for tensor in self.tensors.values()
            if rank in tensor.regions
        )
