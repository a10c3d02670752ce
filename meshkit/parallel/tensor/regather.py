"""Sequence parallelism that keeps its inputs sharded: gathered in forward, and gathered again in backward.

A tensor-parallel region begins with an all-gather of its input, which its linear layers would keep for their weights'
gradients: whole on every rank. Here they keep the rank's part, and the first that needs the whole gathers it once for all.

Two ways lead there. In eager code a linear layer's saved input is replaced by a handle (`Region`). What runs again in
backward, and compiled code, has no use for handles: there the gather is an operator of its own, which a policy of recompute
leaves out of what is kept.
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
from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError


def _fake_gather(part: Tensor, dim: int, size: int, group_name: str) -> Tensor:
    shape = list(part.shape)
    shape[dim] *= size
    return part.new_empty(shape)


@custom_op("gather_region", fake=_fake_gather)
def _gather_region(part: Tensor, dim: int, size: int, group_name: str) -> Tensor:
    """Contiguous, so that linear layers read it as it is: each would make, and keep, a copy of its own."""
    first = part.movedim(dim, 0).contiguous()
    return _torch.all_gather_rows(first, size, group_name).movedim(0, dim).contiguous()


# What a policy of recompute looks for.
GATHER_REGION = torch.ops.meshkit.gather_region.default


def _gather(part: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    whole: Tensor = _gather_region(part, dim, axis.size(), axis.get_group().group_name)
    return whole


class _Kept:
    """One input of a region, as its linear layers keep it."""

    def __init__(self, part: Tensor, dim: int, axis: DeviceMesh) -> None:
        self.dim, self.axis = dim, axis
        self._whole: Tensor | None = None
        # Saved by a node, not held: then whoever watches what is saved, an offload for one, sees it.
        # Its output is held, since on torch 2.11 a node lives no longer than that.
        self._holder = _Keep.apply(part)
        self._part = part if self._holder.grad_fn is None else None

    def whole(self) -> Tensor:
        """[B, T, C], gathered at the first call of a backward."""
        if self._whole is None:
            part = self._holder.grad_fn.saved_tensors[0] if self._part is None else self._part
            self._whole = _gather(part.detach(), self.dim, self.axis)
        return self._whole

    def free(self) -> None:
        self._whole = None


class _Keep(torch.autograd.Function):
    """A node that is in no backward, and so keeps what it saved as long as it lives."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        ctx.save_for_backward(part)
        return part.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise AssertionError("nothing is computed from this output")


class _GatherRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, axis: DeviceMesh, kept: _Kept | None) -> Tensor:
        ctx.dim, ctx.axis, ctx.kept = dim, axis, kept
        return _gather(part, dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.kept is not None:  # every reader of the whole comes before this
            ctx.kept.free()
        return reduce_scatter(grad, ctx.dim, ctx.axis), None, None, None


class Region:
    """The entry of one region, and what its linear layers keep of it.

    hooked: saved inputs are replaced by handles. Off where a policy of recompute, or a full recompute, does the work.
    """

    def __init__(self, dim: int, axis: DeviceMesh) -> None:
        self.dim, self.axis = dim, axis
        self.hooked = True
        self._current: _Whole | None = None

    def enter(self, part: Tensor) -> Tensor:
        """This rank's part of `dim` in, the whole out. Wire: all-gather; backward all-gather and reduce-scatter."""
        if not self._hooks(part):
            out: Tensor = _GatherRegion.apply(part, self.dim, self.axis, None)
            return out
        kept = _Kept(part, self.dim, self.axis)
        out = _GatherRegion.apply(part, self.dim, self.axis, kept)
        # Between here and `leave` layers look for this whole among their inputs. A forward that raises leaves it set; the
        # next `enter` replaces it, and meanwhile it holds no more than a weak reference and this rank's part.
        self._current = _Whole(out, kept)
        return out

    def leave(self) -> None:
        if not torch.compiler.is_compiling():
            self._current = None

    def keep_part(self, linear: nn.Module) -> None:
        """Let a layer inside of the region keep the part where its input is the whole, in place."""
        forward = type(linear).forward

        def kept_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._current is None:
                return forward(module, *args, **kwargs)
            if not any(self._current.is_read_by(x) for x in (*args, *kwargs.values())):
                return forward(module, *args, **kwargs)
            # Around this layer alone: of hooks only the innermost are asked, and those of an offload around are to see what
            # other layers save.
            with saved_tensors_hooks(self._current.pack, _unpack):
                return forward(module, *args, **kwargs)

        kept_forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        patch_class(linear, forward=kept_forward)

    def _hooks(self, part: Tensor) -> bool:
        return self.hooked and torch.is_grad_enabled() and not torch.compiler.is_compiling()


class _Whole:
    """The whole input while the region computes. It is not held, but its address is not given to another either."""

    def __init__(self, whole: Tensor, kept: _Kept) -> None:
        self.kept, self.version = kept, whole._version
        self.memory = StorageWeakRef(whole.untyped_storage())

    def is_read_by(self, tensor: Any) -> bool:
        """Whether the tensor looks at the whole, which nobody has changed since it was gathered."""
        return (
            isinstance(tensor, Tensor)
            and _torch.storage_key(tensor) == self.memory.cdata
            and tensor._version == self.version
        )

    def pack(self, tensor: Tensor) -> Any:
        """Of what looks at the whole, remember only how."""
        if not self.is_read_by(tensor):
            return tensor
        return self.kept, tensor.shape, tensor.stride(), tensor.storage_offset()


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    kept, shape, stride, offset = packed
    # The first reader in backward gathers, on every rank of the axis the same one: backward runs nodes in one order.
    whole: Tensor = kept.whole()
    return whole.as_strided(shape, stride, offset)


def refuse_without_sequence(*, regather: bool, sequence: bool) -> None:
    if regather and not sequence:
        raise PlanError(
            "regather=True keeps the sharded inputs of regions, and with sequence=False inputs are whole on every rank. Use "
            "sequence=True, or regather=False."
        )


def mark(module: nn.Module, region: Region) -> None:
    """Let `regions` find the region that begins at the module."""
    patch_class(module, _meshkit_region=region)


def regions(module: nn.Module) -> Iterator[Region]:
    """The regions that begin at or below the module."""
    for child in module.modules():
        region = getattr(type(child), "_meshkit_region", None)
        if region is not None:
            yield region
