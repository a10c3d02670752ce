"""Sequence parallelism that keeps sharded activations: a region's input is gathered in forward and again in backward.

A tensor-parallel region begins with an all-gather of its input, and its linear layers would keep the gathered input for the
gradients of their weights, all tokens on every rank. Here they keep this rank's shard, and in backward the first layer that
needs the gathered input gathers it once for all layers.

There are two mechanisms. In eager code saved_tensors_hooks replace a linear layer's saved input by a handle (`Region`). For
blocks that run again in backward, and for compiled code, the gather is an operator of its own, which the policy of selective
recompute does not keep.
Dims: B batch, T tokens, C features.
Source: Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from meshkit.core import _torch
from meshkit.core.collectives import reduce_scatter
from meshkit.core.custom_op import custom_op
from meshkit.core.double_backward import once_differentiable
from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError


def _fake_gather(shard: Tensor, dim: int, size: int, group_name: str) -> Tensor:
    shape = list(shard.shape)
    shape[dim] *= size
    return shard.new_empty(shape)


@custom_op("gather_region", fake=_fake_gather)
def _gather_region(shard: Tensor, dim: int, size: int, group_name: str) -> Tensor:
    """All shards joined along `dim`, contiguous: of a strided input each linear layer would make, and keep, a copy."""
    # See [Note: collectives work on dim 0] in core/collectives.py.
    dim_first = shard.movedim(dim, 0).contiguous()
    return _torch.all_gather_rows(dim_first, size, group_name).movedim(0, dim).contiguous()


# The operator by which a policy of selective recompute knows the gather of a region.
GATHER_REGION = torch.ops.meshkit.gather_region.default


def _gather(shard: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    gathered: Tensor = _gather_region(shard, dim, axis.size(), axis.get_group().group_name)
    return gathered


class _ShardedInput:
    """One input of a region, as its linear layers keep it: this rank's shard, gathered on demand."""

    def __init__(self, shard: Tensor, dim: int, axis: DeviceMesh) -> None:
        self.dim, self.axis = dim, axis
        self._gathered: Tensor | None = None
        # [Note: the shard is saved by a node]
        # An attribute would hide the shard from saved_tensors_hooks; saved by an autograd node it passes through them, so
        # that an offload moves it and an accountant counts it. The node's output is kept, since on torch 2.11 a node lives no
        # longer than that. Where no gradient is wanted there is no node, and the shard itself is kept.
        self._node_output = _Save.apply(shard)
        self._shard = shard if self._node_output.grad_fn is None else None

    def gathered(self) -> Tensor:
        """[B, T, C] of all ranks; gathered at the first call in a backward, kept until `free`."""
        if self._gathered is None:
            shard = self._node_output.grad_fn.saved_tensors[0] if self._shard is None else self._shard
            self._gathered = _gather(shard.detach(), self.dim, self.axis)
        return self._gathered

    def free(self) -> None:
        self._gathered = None


class _Save(torch.autograd.Function):
    """A node that no backward reaches. See [Note: the shard is saved by a node]."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        ctx.save_for_backward(shard)
        return shard.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise AssertionError("nothing is computed from this output")


class _GatherRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, axis: DeviceMesh, sharded: _ShardedInput | None) -> Tensor:
        ctx.dim, ctx.axis, ctx.sharded = dim, axis, sharded
        return _gather(shard, dim, axis)

    @staticmethod
    @once_differentiable(
        "sequence parallelism that gathers its sharded inputs again in backward frees them after the first.",
        "Use regather=False",
    )
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.sharded is not None:  # autograd runs this after the backwards of all that read the gathered input
            ctx.sharded.free()
        return reduce_scatter(grad, ctx.dim, ctx.axis), None, None, None


class Region:
    """The entry of one tensor-parallel region, and what its linear layers keep of its input.

    hooked: replace saved inputs by handles. False where recompute, full or by a policy, keeps the shard anyway.
    """

    def __init__(self, dim: int, axis: DeviceMesh) -> None:
        self.dim, self.axis = dim, axis
        self.hooked = True
        self._current: _GatheredInput | None = None

    def enter(self, shard: Tensor) -> Tensor:
        """This rank's shard of `dim` in, the gathered input out. Wire: all-gather; backward all-gather and reduce-scatter."""
        if not self._hooks():
            out: Tensor = _GatherRegion.apply(shard, self.dim, self.axis, None)
            return out
        sharded = _ShardedInput(shard, self.dim, self.axis)
        out = _GatherRegion.apply(shard, self.dim, self.axis, sharded)
        # From here to `leave`, layers look for this tensor among their inputs. A forward that raises leaves it set; the next
        # `enter` replaces it, and until then it keeps no more than a weak reference and this rank's shard.
        self._current = _GatheredInput(out, sharded)
        return out

    def leave(self) -> None:
        if not torch.compiler.is_compiling():
            self._current = None

    def keep_shard(self, linear: nn.Module) -> None:
        """Let a layer inside of the region keep the shard if its input is the region's, in place."""
        forward = type(linear).forward

        def forward_keeping_shard(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._current is None:
                return forward(module, *args, **kwargs)
            if not any(self._current.is_read_by(x) for x in (*args, *kwargs.values())):
                return forward(module, *args, **kwargs)
            # Around this layer alone: only the innermost saved_tensors_hooks are called, and those of an offload around the
            # block must see what other layers save.
            with saved_tensors_hooks(self._current.pack, _unpack):
                return forward(module, *args, **kwargs)

        forward_keeping_shard.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        patch_class(linear, forward=forward_keeping_shard)

    def _hooks(self) -> bool:
        return self.hooked and torch.is_grad_enabled() and not torch.compiler.is_compiling()


class _GatheredInput:
    """Recognises the gathered input of a region, and views of it, while the region computes."""

    def __init__(self, gathered: Tensor, sharded: _ShardedInput) -> None:
        self.sharded, self.version = sharded, gathered._version
        # A weak reference does not keep the memory alive, but keeps its address from being given to another storage.
        self.memory = StorageWeakRef(gathered.untyped_storage())

    def is_read_by(self, tensor: Any) -> bool:
        """Whether the tensor is the gathered input or a view of it, not written to since it was gathered."""
        return (
            isinstance(tensor, Tensor)
            and _torch.storage_key(tensor) == self.memory.cdata
            and tensor._version == self.version
        )

    def pack(self, tensor: Tensor) -> Any:
        """For saved_tensors_hooks: in place of a view of the gathered input, the shard and the view's geometry."""
        if not self.is_read_by(tensor):
            return tensor
        return self.sharded, tensor.shape, tensor.stride(), tensor.storage_offset()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    sharded, shape, stride, offset = packed
    # The first reader in backward gathers. It is the same one on every rank of the axis, since autograd runs nodes in the
    # opposite order of their creation: so all ranks issue the all-gather at the same place.
    gathered: Tensor = sharded.gathered()
    return gathered.as_strided(shape, stride, offset)


def refuse_without_sequence(*, regather: bool, sequence: bool) -> None:
    if regather and not sequence:
        raise PlanError(
            "regather=True keeps the sharded inputs of regions, and with sequence=False inputs are whole on every rank. Use "
            "sequence=True, or regather=False."
        )


def mark_region(module: nn.Module, region: Region) -> None:
    """Record that the region begins at the module, for `regions`."""
    patch_class(module, _meshkit_region=region)


def regions(module: nn.Module) -> Iterator[Region]:
    """The regions that begin at or below the module."""
    for child in module.modules():
        region = getattr(type(child), "_meshkit_region", None)
        if region is not None:
            yield region
