"""Tensor parallelism (TP) and sequence parallelism on one mesh axis, for any nn.Module, by a table of names.

Parameters become DTensors on the axis: names, checkpoints and FSDP see full parameters. Activations stay plain tensors:
inside a forward each module computes with its local shards, and hooks run the collectives of `meshkit.core.collectives` where
a region begins and ends. So the model's own code runs unchanged on fewer heads and features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

from meshkit.core import _torch
from meshkit.core.arguments import require
from meshkit.core.collectives import copy_to_axis, gather_dim, join_dim, reduce_from_axis, scatter_sum_dim, split_dim
from meshkit.core.linear import linear_shape
from meshkit.core.noting import noted
from meshkit.core.patch_class import patch_class
from meshkit.core.quantized_weight import codes_of
from meshkit.core.sharding import chunk
from meshkit.errors import PlanError
from meshkit.loss.linear_logits import LinearLogits, sharded_logits
from meshkit.parallel.tensor.layout import Call, ParamLayout, TensorLayout, number_of, readers, shares_of, tensor_layout
from meshkit.parallel.tensor.regather import Region, mark_region, refuse_without_sequence
from meshkit.plan import Style, match_table
from meshkit.plan.styles import style_table

SEQUENCE_DIM = -2  # of [B, T, features] and of [T, features]
FEATURES_DIM = -1

View = Callable[[nn.Parameter | None], Tensor | None]


def tensor_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, Style],
    sequence: bool = False,
    regather: bool = False,
) -> nn.Module:
    """Split the module over one mesh axis as `plan` says, in place.

    plan: module pattern -> style (`column()`, `row()`, ...); every module that holds parameters must be covered.
    sequence: sequence parallelism, hold the residual stream sharded along dim -2 between regions. Then inputs and outputs of
    the module are sharded that way too, unless an embedding or a head begins or ends it. Otherwise every rank has all tokens.
    regather: with sequence=True, linear layers keep this rank's shard of a region's input, and backward gathers it again.
    Wire, per region and direction: one all-reduce of its input or output; with sequence=True an all-gather and a
    reduce-scatter of the same size instead, and with regather one more all-gather in backward. Replicated parameters that
    compute on a shard of tokens or heads add one all-reduce of their gradient.
    Parameters keep their values, which must be the same on every rank; on meta they stay on meta.
    Raises: PlanError for a plan that does not fit the module or the axis.
    Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.
    """
    require("tensor_parallel", "module", module, nn.Module)
    require("tensor_parallel", "mesh", mesh, DeviceMesh)
    plan = style_table(plan, where="tensor_parallel")
    if mesh.ndim != 1:
        raise PlanError(f"tensor_parallel needs one mesh axis, but got {mesh.mesh_dim_names}. Pass mesh['tp'].")
    refuse_without_sequence(regather=regather, sequence=sequence)
    if mesh.size() == 1:
        # Nothing to split, but a typo in the plan shows on one rank too.
        match_table(plan, dict(module.named_modules(remove_duplicate=False)), what="module")
        return module
    layout = tensor_layout(module, plan, size=mesh.size(), sequence=sequence)
    _refuse_split(module, layout)
    _distribute(module, mesh, layout)
    for name, child in list(module.named_modules()):
        _localize(child, name, mesh, layout)
    modules = dict(module.named_modules())
    for call in layout.calls:
        if call.module in modules:
            region = _region(call, mesh, regather)
            _communicate(modules[call.module], mesh, layout, call, region)
            if region is not None:
                _keep_sharded_input(modules, layout, call, region)
    _set_local_numbers(modules, layout, mesh.get_local_rank())
    return module


def _region(call: Call, mesh: Any, regather: bool) -> Region | None:
    """The region that keeps its input sharded. One that is inside of a container with all tokens has no shard to keep."""
    return Region(SEQUENCE_DIM, mesh) if regather and call.kind == "enter" and not call.whole else None


def _refuse_split(module: nn.Module, layout: TensorLayout) -> None:
    """Raises: PlanError for a parameter that is a DTensor before it is split here. Those of experts may be: they stay so."""
    for name, param in module.named_parameters():
        if name in layout.params and isinstance(param, DTensor):
            raise PlanError(
                f"tensor_parallel: {name!r} is split over a mesh already. Split over tp first, then fully_shard, and each "
                "module once."
            )


class FakeAxis:
    """Stands for a mesh axis where there is no process group, for tensors without values: nothing is sent."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def get_local_rank(self) -> int:
        return self._rank

    def get_group(self) -> Any:
        return SimpleNamespace(group_name="alone")


def shard_without_ranks(
    part: nn.Module, name: str, layout: TensorLayout, *, rank: int = 0, regather: bool = False
) -> nn.Module:
    """Let a part of a model, on fake tensors, compute as it does on one rank of the tensor axis, in place; without ranks.

    part: a copy that nothing else uses. name: the part's name in the model that `layout` was made for. What it then keeps and
    computes is what that rank keeps and computes.
    """
    axis: Any = FakeAxis(layout.size, rank)
    modules = {".".join(filter(None, (name, key))): child for key, child in part.named_modules()}
    sharded: dict[int, nn.Parameter] = {}  # by id of the original, so that a tied one is made once
    for prefix, child in modules.items():
        for key, param in list(child.named_parameters(recurse=False)):
            held = layout.params.get(f"{prefix}.{key}" if prefix else key)  # experts are of other axes
            if held is not None and isinstance(placement := held.placement, Shard):
                shard = chunk(param.shape[placement.dim], layout.size, rank)
                shape = list(param.shape)
                shape[placement.dim] = shard.stop - shard.start
                part_of = nn.Parameter(param.new_empty(shape), param.requires_grad)
                child._parameters[key] = sharded.setdefault(id(param), part_of)
        _localize(child, prefix, axis, layout)
    for call in layout.calls:
        if call.module in modules:
            region = _region(call, axis, regather)
            _communicate(modules[call.module], axis, layout, call, region)
            if region is not None:
                _keep_sharded_input(modules, layout, call, region)
    _set_local_numbers(modules, layout, rank)
    return part


def _set_local_numbers(modules: dict[str, nn.Module], layout: TensorLayout, rank: int) -> None:
    """Set numbers of heads and features that a container reads to this rank's, and the ratio of heads by which transformers'
    grouped-query attention repeats key/value heads."""
    for name, style in layout.styles.items():
        for path in style.local if name in modules else ():
            value = number_of(modules[name], path)
            assert value is not None
            _set_number(modules[name], path, value // layout.size)
    for name, heads in layout.heads.items():
        if name in modules and hasattr(modules[name], "num_key_value_groups"):
            modules[name].num_key_value_groups = heads[rank].query // heads[rank].kv  # type: ignore[assignment]


def _set_number(module: nn.Module, path: str, value: int) -> None:
    owner, _, name = path.rpartition(".")
    if owner:  # a config is the whole model's
        setattr(module, owner, copy(getattr(module, owner)))
    setattr(getattr(module, owner) if owner else module, name, value)


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


def _distribute(module: nn.Module, mesh: DeviceMesh, layout: TensorLayout) -> None:
    """Replace every parameter by a DTensor on the axis; a tied parameter stays one parameter."""
    sharded: dict[int, nn.Parameter] = {}  # by id of the original, so that a tied one is made once
    owners = [
        (owner, key, f"{prefix}.{key}" if prefix else key, param)
        for prefix, owner in module.named_modules()
        for key, param in owner.named_parameters(recurse=False)
    ]
    for owner, key, name, param in owners:
        if name not in layout.params:
            continue
        if id(param) not in sharded:
            value = shard_parameter(param, mesh, layout.params[name].placement)
            sharded[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
        owner._parameters[key] = sharded[id(param)]


def _localize(module: nn.Module, name: str, mesh: DeviceMesh, layout: TensorLayout) -> None:
    """Let `self.weight` be the local tensor to compute with inside the module's forward, connected for autograd.

    Outside of it `module.weight` stays the parameter, a DTensor, as FSDP, checkpoints and users expect.
    """
    keys = [key for key, _ in module.named_parameters(recurse=False)]
    if not keys or layout.styles[name].kind == "experts":
        return
    kind = layout.styles[name].kind
    layouts = {key: layout.params[f"{name}.{key}" if name else key] for key in keys}
    if isinstance(module, nn.Linear) and "weight" in layouts:  # else it is computed from parameters of children
        module.own_columns = _own_columns(module, layouts["weight"], mesh)  # type: ignore[assignment]
        if codes_of(module) is not None and layouts["weight"].dim == 1:
            # Columns of a quantized weight are not columns of its bytes: the layer selects them after it has decoded.
            layouts["weight"] = replace(layouts["weight"], indices=None)
    views = {key: _view(each, mesh) for key, each in layouts.items()}
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


def _view(layout: ParamLayout, mesh: DeviceMesh) -> View:
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
        # No DTensor: a shard already, of `shard_without_ranks`.
        value = _torch.local_shard(param) if isinstance(param, DTensor) else param
        if layout.gradient == "sum":
            value = copy_to_axis(value, mesh)
        return value if indices is None else value.index_select(layout.dim, indices.to(value.device))

    return view


@noted()
def vocab_lookup(weight: Tensor, ids: Tensor, start: int, padding: int | None) -> Tensor:
    """Rows of this rank's vocabulary, `weight`, whose first row is `start`. Those of other ids are zero; the sum over ranks
    adds them."""
    if not len(weight):  # no row to look up: padded by one of zeros, through which the gradient still flows
        return F.embedding(torch.zeros_like(ids), F.pad(weight, (0, 0, 0, 1)))
    outside = (ids < start) | (ids >= start + len(weight))
    rows = F.embedding((ids - start).masked_fill(outside, 0), weight, padding)
    return rows.masked_fill(outside.unsqueeze(-1), 0)


class _LookUp(TorchFunctionMode):
    """Inside, F.embedding looks up this rank's part of the vocabulary. What else a module's forward does stays as it is."""

    def __init__(self, start: int, padding: int | None) -> None:
        super().__init__()
        self.start, self.padding = start, padding

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding:
            given = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
            return vocab_lookup(given["weight"], given["input"], self.start, self.padding)
        return func(*args, **(kwargs or {}))


def _vocab_embedding_forward(module: nn.Embedding, mesh: DeviceMesh) -> Any:
    shard = chunk(module.num_embeddings, mesh.size(), mesh.get_local_rank())
    padding = module.padding_idx
    start, local_padding = (
        shard.start,
        padding - shard.start if padding is not None and shard.start <= padding < shard.stop else None,
    )
    forward = type(module).forward

    def look_up(self: nn.Embedding, *args: Any, **kwargs: Any) -> Tensor:
        with _LookUp(start, local_padding):
            rows: Tensor = forward(self, *args, **kwargs)
        return rows

    return look_up


def _communicate(
    module: nn.Module, mesh: DeviceMesh, layout: TensorLayout, call: Call, region: Region | None = None
) -> None:
    """Hook the collectives of one call onto the module. region: its `enter` is used instead of a plain all-gather."""
    sequence = layout.sequence and not call.whole
    if region is not None:
        _on_first_input(module, region.enter)
    elif call.kind == "enter":
        _on_first_input(module, lambda x: gather_dim(x, SEQUENCE_DIM, mesh) if sequence else copy_to_axis(x, mesh))
    if call.kind == "enter":
        if layout.styles[call.module].kind == "vocab":
            assert isinstance(module, nn.Linear)
            vocabulary = module.out_features
            module.register_forward_hook(lambda module, args, out: _logits_over(out, mesh, vocabulary))
    elif call.kind == "split":
        _on_first_input(module, lambda x: split_dim(x, SEQUENCE_DIM, mesh))
    elif call.kind in ("leave", "leave_whole"):
        scatter = sequence and call.kind == "leave"
        # Prepended, so that it runs before the hook of `_localize` that adds a row's bias: the bias is added to the sum.
        module.register_forward_hook(
            lambda module, args, out: (
                scatter_sum_dim(out, SEQUENCE_DIM, mesh) if scatter else reduce_from_axis(out, mesh)
            ),
            prepend=True,
        )
    elif call.kind == "split_after":
        _on_first_output(module, lambda out: split_dim(out, SEQUENCE_DIM, mesh))
    elif call.kind == "join_features":
        _on_first_output(module, lambda out: join_dim(out, FEATURES_DIM, mesh))
    elif call.kind == "gather_features":
        parts = layout.styles[call.module].parts
        own = torch.tensor(shares_of(parts, layout.size, mesh.get_local_rank())) if parts else None
        _on_first_output(module, lambda out: _gathered_shares(out, own, mesh))
    else:
        _on_first_input(module, lambda x: join_dim(x, SEQUENCE_DIM, mesh))
        if call.kind == "gather_split":
            _on_first_output(module, lambda out: split_dim(out, SEQUENCE_DIM, mesh))


def _keep_sharded_input(modules: Mapping[str, nn.Module], layout: TensorLayout, call: Call, region: Region) -> None:
    """Let the linear layers that may read the input of the region keep this rank's shard of it for backward."""
    for name in readers(modules, layout, call):
        region.keep_shard(modules[name])
    modules[call.module].register_forward_hook(lambda module, args, out: region.leave(), always_call=True)
    mark_region(modules[call.module], region)


def _on_first_input(module: nn.Module, change: Any) -> None:
    """Apply `change` to the first argument of the module's forward, passed by position or by name."""
    # By name too: transformers' decoder layers call their attention as self_attn(hidden_states=...).
    first = next(iter(inspect.signature(module.forward).parameters))

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, first: change(kwargs[first])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _gathered_shares(out: Tensor, own: Tensor | None, mesh: DeviceMesh) -> Tensor:
    """The features of all ranks, or those of them that are a rank's own."""
    features = gather_dim(out, FEATURES_DIM, mesh)
    return features if own is None else features.index_select(FEATURES_DIM, own.to(features.device))


def _on_first_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Apply `change` to what the module returns, or to the first of several things."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return (change(out[0]), *out[1:])
        return change(out)

    module.register_forward_hook(hook)


def _logits_over(out: Tensor | LinearLogits, mesh: DeviceMesh, vocabulary: int) -> DTensor | LinearLogits:
    """The head's output as logits whose vocabulary is sharded over the axis."""
    if isinstance(out, LinearLogits):
        return replace(out, head=out.head.over(mesh))
    return sharded_logits(out, mesh, vocabulary)
