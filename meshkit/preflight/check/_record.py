"""Facts of one rank: its shards, outputs and gradients in a step, as plain tensors that another rank can compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from meshkit.core import _torch
from meshkit.core._torch import tree_leaves
from meshkit.core.gradient import gradient_of
from meshkit.core.model_state import copies_of
from meshkit.core.sharding import local_slices, local_tensor
from meshkit.errors import PlanError
from meshkit.mesh import Mesh
from meshkit.plan import match_table
from meshkit.preflight.check._collective_order import Call

Region = tuple[tuple[int, int], ...]  # (first, after) of each dim
Sharded = Mapping[str, tuple[str, int]]  # parameter pattern -> (axis, dim), for shards that are plain tensors


@dataclass(frozen=True)
class Shard:
    """The shard of a parameter on one rank. after: its value after the optimizer step. stepped: the optimizer holds it."""

    region: Region
    value: Tensor
    trained: bool
    stepped: bool = False
    gradient: Tensor | None = None
    after: Tensor | None = None

    @property
    def slices(self) -> tuple[slice, ...]:
        """The region in the full tensor."""
        return tuple(slice(first, after) for first, after in self.region)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of one rank. coordinate: on the dense axes. shards: by single-device name. tied: names that share a parameter.

    outputs, gradients: of modules, for the rows [first, after) of the batch. calls: collectives of the step.
    foreign_tensors: number of tensors in the optimizer that are not parameters of the model.
    """

    coordinate: dict[str, int]
    shards: dict[str, Shard]
    tied: tuple[tuple[str, ...], ...]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    rows: tuple[int, int]
    loss: float | None
    calls: tuple[Call, ...]
    foreign_tensors: int


class Recorder:
    """Hooks on every module that record its first output, the gradient of that output, and which module runs now."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.order: list[tuple[str, bool]] = []  # (module, whether it ends here)
        self._running: list[str] = []
        self._going_back = ""
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(partial(self._begin, name), prepend=True),
                module.register_forward_hook(partial(self._end, name)),
            ]

    def current_module(self) -> tuple[str, str]:
        """(module, "module (pass)") that runs now."""
        module, phase = (self._running[-1], "forward") if self._running else (self._going_back, "backward")
        return module, f"{module or 'the model'} ({phase})"

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, name: str, module: nn.Module, args: Any) -> None:
        self._running.append(name)
        if name not in self.outputs and not _torch.in_backward():
            self.order.append((name, False))

    def _end(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        if name in self._running:  # a forward that raised never ended
            del self._running[self._running.index(name) :]
        if name in self.outputs or _torch.in_backward():
            return
        self.order.append((name, True))
        tensor = next((leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), None)
        if tensor is None or isinstance(tensor, DTensor) or not tensor.is_floating_point() or _torch.is_fake(tensor):
            return
        self.outputs[name] = tensor.detach().cpu().clone()  # clone: the module may change it in place later
        if tensor.requires_grad:
            tensor.register_hook(partial(self._arrive, name))

    def _arrive(self, name: str, gradient: Tensor) -> None:
        self._going_back = name
        if name not in self.gradients and not isinstance(gradient, DTensor):
            self.gradients[name] = gradient.detach().cpu().clone()


def local_shards(model: nn.Module, mesh: Mesh, sharded: Sharded) -> dict[str, Shard]:
    """The shards of this rank. Wire: with `sharded`, an all-gather of sizes for each parameter that it names."""
    copies, named = copies_of(model), dict(model.named_parameters())
    split = match_table(sharded, named, what="parameter") if sharded else {}
    shards = {}
    for name, param in named.items():
        region = tuple((dim_slice.start, dim_slice.stop) for dim_slice in local_slices(param))
        if name in split:
            region = _region(name, param, mesh, *split[name])
        shards[copies.get(name, name)] = Shard(region, local_tensor(param).cpu().clone(), param.requires_grad)
    return shards


def _region(name: str, param: Tensor, mesh: Mesh, axis: str, dim: int) -> Region:
    if isinstance(param, DTensor):
        raise PlanError(
            f"check: sharded={{{name!r}: ...}}, but it is a DTensor, which says itself how it is split. Leave it out."
        )
    if not -param.ndim <= dim < param.ndim:
        raise PlanError(f"check: sharded={{{name!r}: ({axis!r}, {dim})}}, but it has {param.ndim} dims.")
    sizes = [0] * mesh[axis].size()
    dist.all_gather_object(sizes, param.shape[dim], group=mesh[axis].get_group())
    first = sum(sizes[: mesh[axis].get_local_rank()])
    region = [(0, size) for size in param.shape]
    region[dim] = (first, first + param.shape[dim])
    return tuple(region)


def with_gradients(shards: dict[str, Shard], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Shard]:
    """The shards with their gradients, in the layout of the values, and whether the optimizer holds them."""
    copies, optimized = copies_of(model), {id(param) for group in optimizer.param_groups for param in group["params"]}
    updated = dict(shards)
    for name, param in model.named_parameters():
        gradient, name = gradient_of(param), copies.get(name, name)
        if isinstance(gradient, DTensor) and isinstance(param, DTensor) and gradient.placements != param.placements:
            # A gradient may still be partial, or replicated, where its parameter is sharded.
            gradient = gradient.redistribute(placements=param.placements)
        if name in updated:
            local = None if gradient is None else local_tensor(gradient).cpu().clone()
            updated[name] = replace(updated[name], gradient=local, stepped=id(param) in optimized)
    return updated


def with_values_after(shards: dict[str, Shard], model: nn.Module) -> dict[str, Shard]:
    copies, updated = copies_of(model), dict(shards)
    for name, param in model.named_parameters():
        name = copies.get(name, name)
        if name in updated:
            updated[name] = replace(updated[name], after=local_tensor(param).cpu().clone())
    return updated


def foreign_tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    of_model = {id(param) for param in model.parameters()}
    return sum(id(param) not in of_model for group in optimizer.param_groups for param in group["params"])


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names of one parameter."""
    groups: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(param), []).append(name)
    return tuple(tuple(names) for names in groups.values())
