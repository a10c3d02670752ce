"""DTensor: offsets of shards, gradients of uneven ones, and its propagation of shardings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import _disable_current_modes

from meshkit.core.double_backward import once_differentiable


def global_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local shape, global offset) of this rank's shard; exact for uneven shards and for FSDP over TP (_StridedShard).

    Private: compute_local_shape_and_global_offset. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def dtensor_of(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: tuple[int, ...],
    *,
    local: Tensor | None = None,
    like: Tensor,
) -> DTensor:
    """A DTensor of a shape, on a mesh. local: this rank's shard; None makes zeros of the dtype and on the device of `like`.

    Private: DTensor's constructor and DTensorSpec, as in `dtensor_like`, and compute_local_shape_and_global_offset. Checked:
    2.11, 2.15. Replaced by: nothing yet.
    """
    if local is None:
        local = like.new_zeros(compute_local_shape_and_global_offset(shape, mesh, placements)[0])
    full = torch.empty(shape, dtype=local.dtype, device="meta")
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(full.shape, full.stride(), local.dtype))
    return DTensor(local, spec, requires_grad=False)


def dtensor_like(param: DTensor, local: Tensor, shape: tuple[int, ...] | None = None) -> DTensor:
    """A DTensor with the mesh and placements of `param`, of which `local` is this rank's shard, on whatever device it is.

    shape: of the full tensor, where it is not that of `param`.
    Private: DTensor's constructor and DTensorSpec, as FSDP2 uses them; `DTensor.from_local` would move a host tensor to the
    mesh's device. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    if shape is None and local.dtype == param.dtype:
        return DTensor(local, param._spec, requires_grad=False)
    full = torch.empty(tuple(param.shape) if shape is None else shape, dtype=local.dtype, device="meta")
    spec = DTensorSpec(
        param.device_mesh, param.placements, tensor_meta=TensorMeta(full.shape, full.stride(), local.dtype)
    )
    return DTensor(local, spec, requires_grad=False)


def set_local(tensor: DTensor, local: Tensor) -> None:
    """Give a DTensor another shard, in place, of as many rows as the owner of this shard says; whoever asks the DTensor for
    sizes and offsets of shards is told what its placements say.

    Private: DTensor._local_tensor. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    tensor._local_tensor = local


# [Note: gradients of uneven shards]
# Autograd accumulates a gradient as it comes only if its layout is the parameter's; otherwise it copies it, and a copy of a
# DTensor to another layout is a collective that leaves the full gradient on every rank. On 2.11 the backward of `to_local`
# gives the gradient the strides that it would have if all shards were as large as this one, so an uneven shard falls into
# that. `_LocalShard` builds the gradient with the parameter's own spec. Compiled blocks use `to_local` all the same, and
# there the copy remains: `ShardedAdamW` (optim/fused.py) takes such gradients.
_TO_LOCAL_KEEPS_STRIDES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


def local_shard(param: DTensor) -> Tensor:
    """This rank's shard of a parameter, connected for autograd: its gradient has the placements of `param`.

    Private: nothing; `to_local` behaves otherwise. Checked: 2.11, 2.15. Replaced by: `to_local`, with 2.15.
    See [Note: gradients of uneven shards].
    """
    if _TO_LOCAL_KEEPS_STRIDES or torch.compiler.is_compiling():
        return param.to_local()
    shard: Tensor = _LocalShard.apply(param)
    return shard


def shard_object(param: DTensor) -> Tensor:
    """The very tensor that a parameter's shard is, attributes of a subclass included, and no alias of it.

    Private: DTensor._local_tensor, which FSDP gathers from. Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    return param._local_tensor


class _LocalShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: DTensor) -> Tensor:
        ctx.param = param
        local = param.to_local()
        return local.view_as(local)

    @staticmethod
    @once_differentiable("the gradient of a shard is made without its graph on torch 2.11.", "Use torch 2.15")
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        # Contiguous, as the parameter's own shard is. See [Note: gradients of uneven shards].
        return dtensor_like(ctx.param, grad.detach().contiguous())


def clear_sharding_caches() -> None:
    """Drop the shardings that DTensor has cached for meshes that are gone: a later mesh of the same shape compares equal.

    Private: the lru_cache of the Python propagator, and a function for the cache in C++. Checked: 2.11, 2.15. Replaced by:
    nothing yet.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    for cached in (propagator.propagate_op_sharding, getattr(propagator, "_propagate_tensor_meta", None)):
        cache: Any = cached if hasattr(cached, "cache_clear") else getattr(cached, "cache", None)
        if hasattr(cache, "cache_clear"):
            cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


@contextmanager
def hiding_shape_propagation() -> Iterator[None]:
    """Inside, no dispatch mode sees how DTensor works out shapes, which it does on tensors of the *global* shape.

    Private: ShardingPropagator._propagate_tensor_meta_non_cached; `_disable_current_modes` is what torch.compile uses.
    Checked: 2.11, 2.15. Replaced by: nothing yet.
    """
    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def without_modes(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(self, *args, **kwargs)

    ShardingPropagator._propagate_tensor_meta_non_cached = without_modes  # type: ignore[method-assign]  # restored below
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = original  # type: ignore[method-assign]


@contextmanager
def detach_keeps_placements() -> Iterator[None]:
    """Inside, DTensor knows that `detach` keeps placements, and does not search all combinations of them.

    Private: the propagator's tables of strategies. Checked: 2.11, which knows, and 2.15: for each shape of a parameter FSDP2
    makes it search for 0.03 s on three axes and for 0.4 s on four. Replaced by: a rule for `detach` in torch.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    detach = torch.ops.aten.detach.default
    search = getattr(propagator, "op_single_dim_strategy_funcs", {}).pop(detach, None)
    if search is None:
        yield
        return
    propagator.op_strategy_funcs[detach] = _as_its_input
    try:
        yield
    finally:
        del propagator.op_strategy_funcs[detach]
        propagator.op_single_dim_strategy_funcs[detach] = search


def _as_its_input(schema: Any) -> OpStrategy:
    spec = schema.args_schema[0].strategies[0].output_spec
    return OpStrategy([OpSpec(output_specs=spec, input_specs=(spec,), redistribute_cost=[[0.0]])])
