"""Differentiable collectives over one mesh axis, in mirrored pairs.

| forward                          | backward                         | field's name           |
|----------------------------------|----------------------------------|------------------------|
| `copy_to_axis`: nothing          | all-reduce                       | Megatron's f           |
| `reduce_from_axis`: all-reduce   | nothing                          | Megatron's g           |
| `gather_dim`: all-gather         | reduce-scatter                   | sequence parallel's g  |
| `scatter_sum_dim`: reduce-scatter| all-gather                       | its mirror             |
| `split_dim`: keep local slice    | all-gather                       | enter without a sum    |
| `join_dim`: all-gather           | keep local slice                 | its mirror             |

Each takes a 1-D DeviceMesh. They are out of place and built on PyTorch's functional collectives, so that recompute and
torch.compile see plain operators. On an axis of size 1 each is the identity and sends nothing. The backward of each is the
forward of its mirror, and of what the mirror takes and gives the same holds: so a backward that is to be differentiated again
(create_graph=True) goes through the mirror's node, and `reduce_from_axis` and `copy_to_axis` are each other's.

[Note: collectives work on dim 0] NCCL and gloo join and split along the first dim, and read memory as it lies. So `dim` is
moved to the front and made contiguous, which is a copy unless it is there already. `movedim` and no einops pattern, since
`dim` is an argument and the number of dims is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core import _torch
from meshkit.core.double_backward import is_differentiated_again
from meshkit.core.noting import noted
from meshkit.errors import PlanError

# Who sees what this rank sends. Global and not a context variable: on CUDA backward runs in autograd's own threads.
_watchers: list[Callable[[Tensor], None]] = []


@contextmanager
def seeing_what_is_sent(see: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, `see` is called with the local tensor of each collective of this file before it is sent."""
    _watchers.append(see)
    try:
        yield
    finally:
        _watchers.remove(see)


def _shown(tensor: Tensor) -> Tensor:
    for see in _watchers:
        see(tensor)
    return tensor


def all_reduce(tensor: Tensor, axis: DeviceMesh) -> Tensor:
    """The sum over the axis, outside autograd. Wire: one all-reduce of the tensor."""
    if axis.size() == 1:
        return tensor
    return _torch.all_reduce_sum(_shown(tensor).contiguous(), axis.get_group().group_name)


def all_gather(tensor: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """Slices of equal size joined along `dim`, outside autograd. Wire: one all-gather of the result."""
    if axis.size() == 1:
        return tensor
    # See [Note: collectives work on dim 0]. The result is a view; a caller who needs it contiguous makes the copy.
    dim_first = _shown(tensor).movedim(dim, 0).contiguous()
    return _torch.all_gather_rows(dim_first, axis.size(), axis.get_group().group_name).movedim(0, dim)


def reduce_scatter(tensor: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """The sum over the axis, of which each rank keeps its slice of `dim`. Wire: one reduce-scatter of the tensor."""
    if axis.size() == 1:
        return tensor
    if tensor.shape[dim] % axis.size():
        raise PlanError(
            f"sequence=True splits dim {dim % tensor.ndim} of a tensor {tuple(tensor.shape)} over tp={axis.size()}, and "
            f"{tensor.shape[dim]} is not a multiple of {axis.size()}. Pad the sequence, or use sequence=False."
        )
    dim_first = _shown(tensor).movedim(dim, 0).contiguous()
    local = _torch.reduce_scatter_rows(dim_first, axis.size(), axis.get_group().group_name)
    # Memory of its own: FSDP2 hooks what a module returns, and warns of a view.
    return local.movedim(0, dim).clone(memory_format=torch.contiguous_format)


def local_slice(tensor: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """This rank's slice of `dim`, a view; all slices are of equal size. No communication."""
    if tensor.shape[dim] % axis.size():
        raise PlanError(
            f"dim {dim} of a tensor {tuple(tensor.shape)} cannot be split evenly over {axis.size()} ranks. Pad the sequence "
            f"to a multiple of {axis.size()}, or use sequence=False."
        )
    size = tensor.shape[dim] // axis.size()
    return tensor.narrow(dim, axis.get_local_rank() * size, size)


class _CopyToAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: DeviceMesh) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Autograd runs this after the backwards of all readers, weight gradients included, so there is nothing left to
        # compute while the message travels: it is waited for at once.
        return (_ReduceFromAxis.apply if is_differentiated_again() else all_reduce)(grad, ctx.axis), None


class _ReduceFromAxis(torch.autograd.Function):
    # The mathematical transpose of an all-reduce is an all-reduce. None is needed here: every rank computes the same from the
    # sum, so each already has the full gradient of it.
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: DeviceMesh) -> Tensor:
        ctx.axis = axis
        return all_reduce(tensor, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _CopyToAxis.apply(grad, ctx.axis) if is_differentiated_again() else grad, None


class _GatherDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return all_gather(tensor, dim, axis).contiguous()  # or each linear layer that reads it makes and keeps a copy

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        moved = _ScatterSumDim.apply if is_differentiated_again() else reduce_scatter
        return moved(grad, ctx.dim, ctx.axis), None, None


class _ScatterSumDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return reduce_scatter(tensor, dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        moved = _GatherDim.apply if is_differentiated_again() else all_gather
        return moved(grad, ctx.dim, ctx.axis), None, None


class _SplitDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return local_slice(tensor, dim, axis).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        moved = _JoinDim.apply if is_differentiated_again() else all_gather
        return moved(grad, ctx.dim, ctx.axis), None, None


class _JoinDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return all_gather(tensor, dim, axis).contiguous()  # as the full tensor is, for code that views it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if is_differentiated_again():
            return _SplitDim.apply(grad, ctx.dim, ctx.axis), None, None
        return local_slice(grad, ctx.dim, ctx.axis).contiguous(), None, None


@noted()
def copy_to_axis(tensor: Tensor, axis: DeviceMesh) -> Tensor:
    """Same tensor on every rank in, used differently by each. Wire: backward, one all-reduce of the tensor."""
    return tensor if axis.size() == 1 else _CopyToAxis.apply(tensor, axis)


@noted()
def reduce_from_axis(tensor: Tensor, axis: DeviceMesh) -> Tensor:
    """A different summand on each rank in, the sum out. Wire: forward, one all-reduce of the tensor."""
    return tensor if axis.size() == 1 else _ReduceFromAxis.apply(tensor, axis)


@noted()
def gather_dim(tensor: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """Slices of `dim` in, the full tensor out, used differently by each rank. Wire: all-gather, backward reduce-scatter."""
    return tensor if axis.size() == 1 else _GatherDim.apply(tensor, dim, axis)


@noted()
def scatter_sum_dim(tensor: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """A different summand on each rank in, a slice of the sum out. Wire: reduce-scatter, backward all-gather.

    Raises: PlanError when the axis does not divide `dim`.
    """
    return tensor if axis.size() == 1 else _ScatterSumDim.apply(tensor, dim, axis)


@noted()
def split_dim(tensor: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """Same tensor on every rank in, a slice of `dim` out. Wire: backward, one all-gather of the tensor."""
    return tensor if axis.size() == 1 else _SplitDim.apply(tensor, dim, axis)


@noted()
def join_dim(tensor: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """Slices of `dim` in, the full tensor out, used alike by each rank. Wire: forward, one all-gather of the result."""
    return tensor if axis.size() == 1 else _JoinDim.apply(tensor, dim, axis)
