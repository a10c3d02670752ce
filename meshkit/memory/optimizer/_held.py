"""One parameter of an optimizer on the host: what is kept for it, and whether somebody else has written it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshkit import _torch
from meshkit.sharding import local_tensor


class Held:
    """One parameter and what is kept for it. Tensors have the shape of this rank's shard.

    master: in fp32, or the parameter's dtype if that is wider; None where a resident parameter is its own master.
    gradients: empty where it is resident; two with a delayed update, which reads one while backward fills the other.
    """

    def __init__(self, param: Tensor, tensors: Iterator[Tensor], gradients: int, *, resident: bool) -> None:
        local = local_tensor(param)
        self.param, self.resident = param, resident
        self.dtype = master_dtype(param)
        self.moments = {"exp_avg": next(tensors), "exp_avg_sq": next(tensors)}
        self.master = None if resident and self.dtype == param.dtype else next(tensors)
        self.gradients = [next(tensors) for _ in range(gradients)]
        self.has_gradient = False
        self.seen = (-1, -1, -1, -1)
        if self.master is not None:
            self.master.copy_(local)
            self.seen = stamp(param)


def master_dtype(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def narrow(param: Tensor) -> bool:
    """Whether the master has bits that the parameter has not."""
    return param.dtype != master_dtype(param)


def stamp(param: Tensor) -> tuple[int, int, int, int]:
    """Changes with every write in place, to the shard or through its DTensor, and when the shard moves."""
    local = local_tensor(param)
    return *address(local), local._version, param._version


def address(tensor: Tensor) -> tuple[int, int]:
    """Where its first element lies; an estimate's tensors have a storage, but no address in memory."""
    return _torch.storage_key(tensor), int(tensor.storage_offset())
