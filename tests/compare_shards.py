"""Compare a DTensor with the full tensor it should be: each rank compares its shard.

So replicas that differ between ranks are seen too, and a comparison costs no collective. Every rank must be asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshkit.core.sharding import local_slices, local_tensor

Result = TypeVar("Result")


def computed_once(function: Callable[..., Result], *args: object) -> Result:
    """`function(*args)` of rank 0, broadcast to every rank: an oracle need not be computed by all of them."""
    result: list[Result | None] = [function(*args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result)
    assert result[0] is not None
    return result[0]


def difference(value: Tensor | None, expected: Tensor) -> float:
    """The largest absolute difference of this rank's shard: 0 of an empty one, inf where one of both is NaN."""
    assert value is not None
    assert value.shape == expected.shape
    shard, expected_shard = local_tensor(value), expected.detach()[local_slices(value)]
    assert shard.shape == expected_shard.shape
    # inf for NaN: callers take the `max` of several differences, and Python's `max(0.0, nan)` is 0.0.
    errors = (shard.to(expected_shard.device, expected_shard.dtype) - expected_shard).abs().nan_to_num(nan=torch.inf)
    return float(errors.max()) if shard.numel() else 0.0


def same_bits(value: Tensor, expected: Tensor) -> bool:
    return value.shape == expected.shape and torch.equal(
        local_tensor(value).to(expected.device), expected.detach()[local_slices(value)]
    )
