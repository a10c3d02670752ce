"""A tensor on a mesh held against the whole one it should be, which rank 0 computes: each rank looks at its own part.

So copies that differ between ranks show as well, and a comparison costs no collective. Every rank must be asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core.sharding import local_slices, local_tensor

Found = TypeVar("Found")


def computed_once(function: Callable[..., Found], *args: object) -> Found:
    """What `function(*args)` is on rank 0, on every rank: an oracle need not be computed by all of them."""
    found: list[Found | None] = [function(*args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


def difference(value: Tensor | None, expected: Tensor) -> float:
    """The largest absolute difference of this rank's part; 0 where it holds nothing, inf where one of both is NaN."""
    assert value is not None
    assert value.shape == expected.shape
    own, wanted = local_tensor(value), expected.detach()[local_slices(value)]
    assert own.shape == wanted.shape
    apart = (own.to(wanted.dtype) - wanted).abs().nan_to_num(nan=torch.inf)  # `max` of Python loses a NaN
    return float(apart.max()) if own.numel() else 0.0


def same_bits(value: Tensor, expected: Tensor) -> bool:
    return value.shape == expected.shape and torch.equal(local_tensor(value), expected.detach()[local_slices(value)])
