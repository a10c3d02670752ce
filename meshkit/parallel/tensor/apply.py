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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshkit.core import _torch
from meshkit.core.arguments import require
from meshkit.core.collectives import copy_to_axis, gather_dim, join_dim, reduce_from_axis, scatter_sum_dim, split_dim
from meshkit.core.sharding import chunk
from meshkit.core.to_device import to_device
from meshkit.errors import PlanError
from meshkit.loss.linear_logits import LinearLogits, sharded_logits
from meshkit.parallel.tensor.layout import Call, TensorLayout, number_of, readers, shares_of, tensor_layout
from meshkit.parallel.tensor.local import localize, shard_parameter
from meshkit.parallel.tensor.regather import Region, mark_region, refuse_without_sequence
from meshkit.plan import Style, match_table
from meshkit.plan.auto import join
from meshkit.plan.styles import style_table

SEQUENCE_DIM = -2  # of [B, T, features] and of [T, features]
FEATURES_DIM = -1


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
        localize(child, name, mesh, layout)
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
    modules = {join(name, key): child for key, child in part.named_modules()}
    sharded: dict[int, nn.Parameter] = {}  # by id of the original, so that a tied one is made once
    for prefix, child in modules.items():
        for key, param in list(child.named_parameters(recurse=False)):
            held = layout.params.get(join(prefix, key))  # experts are of other axes
            if held is not None and isinstance(placement := held.placement, Shard):
                shard = chunk(param.shape[placement.dim], layout.size, rank)
                shape = list(param.shape)
                shape[placement.dim] = shard.stop - shard.start
                part_of = nn.Parameter(param.new_empty(shape), param.requires_grad)
                child._parameters[key] = sharded.setdefault(id(param), part_of)
        localize(child, prefix, axis, layout)
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


def _distribute(module: nn.Module, mesh: DeviceMesh, layout: TensorLayout) -> None:
    """Replace every parameter by a DTensor on the axis; a tied parameter stays one parameter."""
    sharded: dict[int, nn.Parameter] = {}  # by id of the original, so that a tied one is made once
    owners = [
        (owner, key, join(prefix, key), param)
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
        _torch.prepend_forward_hook(
            module,
            lambda module, args, out: (
                scatter_sum_dim(out, SEQUENCE_DIM, mesh) if scatter else reduce_from_axis(out, mesh)
            ),
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
    return features if own is None else features.index_select(FEATURES_DIM, to_device(own, features.device))


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
