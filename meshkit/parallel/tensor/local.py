"""What a module computes with inside of its forward: this rank's part of each parameter, in place of the DTensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

from meshkit.core import _torch
from meshkit.core.collectives import copy_to_axis
from meshkit.core.linear import linear_shape
from meshkit.core.noting import noted
from meshkit.core.patch_class import patch_class
from meshkit.core.quantized_weight import codes_of
from meshkit.core.sharding import chunk
from meshkit.errors import PlanError
from meshkit.parallel.tensor.layout import ParamLayout, TensorLayout
from meshkit.plan.auto import join

View = Callable[[nn.Parameter | None], Tensor | None]


def inside_forward(module: nn.Module, key: str) -> Tensor:
    """`module.<key>` as the module's forward reads it: the local tensor to compute with, connected for autograd."""
    if not hasattr(module, "_computing"):
        value: Tensor = getattr(module, key)
        return value
    module._computing = True  # type: ignore[assignment]
    try:
        local: Tensor = getattr(module, key)
        return local
    finally:
        module._computing = False  # type: ignore[assignment]


def shard_parameter(param: Tensor, mesh: DeviceMesh, *placements: Shard | Replicate) -> DTensor:
    """A DTensor of a value that every rank has, of which this rank keeps its shard. No communication; meta stays meta.

    placements: one for each axis of the mesh; no two shard the same dim.
    """
    local = param.detach()
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shard = chunk(param.shape[placement.dim], mesh.size(axis), mesh.get_local_rank(axis))
            local = local.narrow(placement.dim, shard.start, shard.stop - shard.start)
    if any(isinstance(placement, Shard) for placement in placements):
        # A view would keep the memory of the full parameter alive. In the order of the DTensor, whatever the parameter's was.
        local = local.clone(memory_format=torch.contiguous_format)
    local = local.contiguous()
    # Shape and stride are given, since DTensor would take all shards to be as large as this one. A check would be a message.
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=param.shape, stride=param.contiguous().stride()
    )


def localize(module: nn.Module, name: str, mesh: DeviceMesh, layout: TensorLayout) -> None:
    """Let `self.weight` be the local tensor to compute with inside the module's forward, connected for autograd.

    Outside of it `module.weight` stays the parameter, a DTensor, as FSDP, checkpoints and users expect.
    """
    keys = [key for key, _ in module.named_parameters(recurse=False)]
    if not keys or layout.styles[name].kind == "experts":
        return
    kind = layout.styles[name].kind
    layouts = {key: layout.params[join(name, key)] for key in keys}
    if isinstance(module, nn.Linear) and "weight" in layouts:  # else it is computed from parameters of children
        module.own_columns = _own_columns(module, layouts["weight"], mesh)  # type: ignore[assignment]
        if codes_of(module) is not None and layouts["weight"].dim == 1:
            # Columns of a quantized weight are not columns of its bytes: the layer selects them after it has decoded.
            layouts["weight"] = replace(layouts["weight"], indices=None)
    views = {
        key: _view(each, mesh, _refuse_unlike(join(name, key), module._parameters[key]))
        for key, each in layouts.items()
    }
    shape = linear_shape(module)
    transposed = shape is not None and shape.transposed
    if kind == "row" and "bias" in views:
        # Added after the sum: the forward's own addition would count it once per rank.
        bias = views.pop("bias")
        views["bias"] = lambda param: None
        add: Any = _add_to_tokens if transposed else torch.add
        module.register_forward_hook(lambda module, args, out: add(out, bias(module._parameters["bias"])))
    forward = None
    if kind == "vocab" and isinstance(module, nn.Embedding):
        forward = _vocab_embedding_forward(module, mesh)
    if isinstance(module, nn.MultiheadAttention):
        forward = _forward_with_projection(module)
    if transposed:
        forward = _transposed_forward
    compute_with(module, views, forward, outside=layout.styles[name].outside)


def _forward_with_projection(module: nn.MultiheadAttention) -> Any:
    """torch's attention multiplies by its child's weight itself, and never calls the child."""
    forward = type(module).forward

    def attend(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        self.out_proj._computing = True  # type: ignore[assignment]  # as in `compute_with`
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.out_proj._computing = False  # type: ignore[assignment]

    return attend


def _transposed_forward(self: nn.Module, x: Tensor) -> Tensor:
    """transformers' Conv1D of this rank's features: its own forward knows how many all ranks have, and wants a bias."""
    weight, bias = self.weight, self.bias
    assert isinstance(weight, Tensor)
    out = x.reshape(-1, x.shape[-1]) @ weight
    if isinstance(bias, Tensor):
        out = out + bias
    return out.view(*x.shape[:-1], weight.shape[1])


def _add_to_tokens(out: Tensor, bias: Tensor | None) -> Tensor:
    """As Conv1D adds it: a proof compares operators."""
    assert bias is not None
    return (out.reshape(-1, out.shape[-1]) + bias).view_as(out)


def _own_columns(linear: nn.Linear, layout: ParamLayout, mesh: DeviceMesh) -> Tensor | None:
    """The features of the full layer's input that are this rank's input; None for all."""
    if layout.indices is not None and layout.dim == 1:
        return torch.tensor(layout.indices[mesh.get_local_rank()])
    if isinstance(layout.placement, Shard) and layout.placement.dim == 1:
        shard = chunk(linear.in_features, mesh.size(), mesh.get_local_rank())
        return torch.arange(shard.start, shard.stop)
    return None


def compute_with(module: nn.Module, views: Mapping[str, View], forward: Any = None, *, outside: bool = False) -> None:
    """Inside of `module.forward`, each of these attributes reads as the view of its parameter. See [Note: local parameters].

    forward: replaces the class's own. outside: outside of it too.
    """
    # [Note: local parameters]
    # The attribute is a property of a subclass (see `patch_class`) that returns the DTensor outside of the forward, and
    # inside of it the local shard. A flag on the module says which; it is set here, around the forward and nothing else,
    # since hooks (FSDP's, an optimizer's) want the parameter. Compiled code always reads the shard, and sets no flag: on 2.11
    # a compiled recompute may not change attributes.
    forward = forward or type(module).forward

    def local_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        self._computing = True  # type: ignore[assignment]
        try:
            return forward(self, *args, **kwargs)
        finally:
            self._computing = False  # type: ignore[assignment]

    module._computing = False  # type: ignore[assignment]
    local_forward.__signature__ = inspect.signature(type(module).forward)  # type: ignore[attr-defined]
    local = {key: _local_inside_forward(key, view, outside) for key, view in views.items()}
    patch_class(module, forward=local_forward, **local)


def _local_inside_forward(key: str, view: View, outside: bool) -> Any:
    def read(module: nn.Module) -> Tensor | None:
        param = module._parameters[key]
        if outside and not module._computing and _is_sharded(param):
            return param  # FSDP itself asks for it
        return view(param) if outside or module._computing or torch.compiler.is_compiling() else param

    return property(read)


def _is_sharded(param: nn.Parameter | None) -> bool:
    """Whether it is split over other axes too, as FSDP holds it between forwards."""
    return isinstance(param, DTensor) and param.device_mesh.ndim > 1


def _refuse_unlike(name: str, param: nn.Parameter | None) -> Callable[[Tensor], None]:
    """Of what a forward is given in place of a parameter, as torch.func.functional_call does: only the same part fits.

    Not where there are no ranks: what a model itself does so is proved there.
    """
    if not isinstance(param, DTensor):
        return lambda given: None
    placements, shape = param.placements, _torch.local_shard(param).shape

    def refuse(given: Tensor) -> None:
        if given.placements != placements if isinstance(given, DTensor) else given.shape != shape:
            has = (
                f"placed as {given.placements}" if isinstance(given, DTensor) else f"a plain tensor {list(given.shape)}"
            )
            raise PlanError(
                f"parallelize: {name!r} is placed as {placements} over tp, and its module is called with {has} in its place "
                "(torch.func.functional_call). Give what is computed of the run's own parameters (run.named_parameters()), "
                "or call the model before parallelize."
            )

    return refuse


def _view(layout: ParamLayout, mesh: DeviceMesh, refuse_unlike: Callable[[Tensor], None]) -> View:
    indices = None if layout.indices is None else torch.tensor(layout.indices[mesh.get_local_rank()])

    def view(param: nn.Parameter | None) -> Tensor:
        assert param is not None
        if isinstance(param, DTensor) and param.device_mesh.ndim > mesh.ndim and not torch.compiler.is_compiling():
            # Under FSDP a forward sees gathered parameters, which have the axis tp alone.
            raise PlanError(
                "parallelize: a module runs while its parameters are shards, for its unit does not: the model is called by "
                "another method than forward. Call forward, or after parallelize "
                "torch.distributed.fsdp.register_fsdp_forward_method(module, name), of the model or of the unit."
            )
        if not torch.compiler.is_compiling():
            refuse_unlike(param)
        # No DTensor: a shard already, of `shard_without_ranks`.
        value = _torch.local_shard(param) if isinstance(param, DTensor) else param
        if layout.gradient == "sum":
            value = copy_to_axis(value, mesh)
        return value if indices is None else value.index_select(layout.dim, indices.to(value.device))

    return view


@noted()
def vocab_lookup(weight: Tensor, ids: Tensor, start: int, padding: int | None, vocabulary: int) -> Tensor:
    """Rows of this rank's vocabulary, `weight`, whose first row is `start`. Those of other ids are zero; the sum over ranks
    adds them. Ids that are no rank's raise as on one device: IndexError on the host, an assertion on a GPU."""
    if not len(weight):  # no row to look up: padded by one of zeros, through which the gradient still flows
        return F.embedding(torch.zeros_like(ids), F.pad(weight, (0, 0, 0, 1)))
    outside = (ids < start) | (ids >= start + len(weight))
    others = outside & (ids >= 0) & (ids < vocabulary)  # what is no rank's is looked up, and there is no such row
    rows = F.embedding((ids - start).masked_fill(others, 0), weight, padding)
    return rows.masked_fill(outside.unsqueeze(-1), 0)


class _LookUp(TorchFunctionMode):
    """Inside, F.embedding looks up this rank's part of the vocabulary. What else a module's forward does stays as it is."""

    def __init__(self, start: int, padding: int | None, vocabulary: int) -> None:
        super().__init__()
        self.start, self.padding, self.vocabulary = start, padding, vocabulary

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding:
            given = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
            return vocab_lookup(given["weight"], given["input"], self.start, self.padding, self.vocabulary)
        return func(*args, **(kwargs or {}))


def _vocab_embedding_forward(module: nn.Embedding, mesh: DeviceMesh) -> Any:
    shard = chunk(module.num_embeddings, mesh.size(), mesh.get_local_rank())
    padding, vocabulary = module.padding_idx, module.num_embeddings
    start, local_padding = (
        shard.start,
        padding - shard.start if padding is not None and shard.start <= padding < shard.stop else None,
    )
    forward = type(module).forward

    def look_up(self: nn.Embedding, *args: Any, **kwargs: Any) -> Tensor:
        with _LookUp(start, local_padding, vocabulary):
            rows: Tensor = forward(self, *args, **kwargs)
        return rows

    return look_up
