"""The program: the model as it is before anything is split. All decisions read it, and none reads the module on a rank.

A traced program will enter here, as further fields of `Program`: operations, and data flow between modules.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedTensorMixin

from meshkit.core.arguments import require
from meshkit.core.model_state import full_model_of
from meshkit.errors import PlanError


@dataclass(frozen=True, eq=False)
class Program:
    """model: the modules of all stages. Its tensors' shapes and dtypes are read, never their values."""

    model: nn.Module

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """By name, each once."""
        return dict(self.model.named_modules())

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """By name, each once."""
        return dict(self.model.named_parameters())

    @cached_property
    def trained(self) -> frozenset[str]:
        """Every name of the parameters that require a gradient, tied ones under each of theirs."""
        named = self.model.named_parameters(remove_duplicate=False)
        return frozenset(name for name, param in named if param.requires_grad)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the first parameter: what the model computes in, unless a `Precision` says otherwise."""
        return next(self.model.parameters()).dtype

    def frozen(self) -> Program:
        """The same program of a copy without values, which does not change when the model does."""
        return Program(without_values(self.model))


def read_program(model: nn.Module) -> Program:
    """The program of a model, before anything is done to it.

    Raises: PlanError for a model cut into pipeline stages, of which this rank has only some, for one that is split over a
    mesh already, for one that is partly on meta, and for what is no module.
    """
    require("parallelize", "model", model, nn.Module)
    if full_model_of(model) is not None:
        raise PlanError(
            f"{type(model).__name__}: this model has the stages of one rank of pp only. Give the whole one: "
            "`run.full_model`, or the model before parallelize."
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedTensorMixin):
            raise PlanError(
                f"{type(model).__name__}: {name!r} has no shape yet, for its module is lazy and gets it from its first input. "
                "Run the model once on a batch before parallelize: `with torch.no_grad(): model(...)`."
            )
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise PlanError(
                f"{type(model).__name__}: {name!r} is split over a mesh already. Give the model before parallelize, or "
                "`run.full_model`."
            )
    plain = [param.is_meta for param in model.parameters() if type(param.data) is Tensor]
    if any(plain) and not all(plain):
        raise PlanError("parallelize: some parameters are on meta and some not. Build the whole model in one place.")
    return Program(model)


def without_values(model: nn.Module) -> nn.Module:
    """A copy of the modules with parameters on meta. Tied parameters stay tied; all else is shared with the model.

    Parameters that are no plain tensors (quantized ones) are shared too. Its hooks are its own: those put on the
    model later are not on the copy, nor the other way.
    """
    # No deep copy: it fails on what a user's module may hold beside tensors, such as a lock, a file or a generator.
    params: dict[int, nn.Parameter] = {}
    for param in model.parameters():
        params[id(param)] = param
        if type(param.data) is Tensor:
            # With its strides, which `empty_like` keeps for dense tensors only: a view is told by them.
            empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
            params[id(param)] = nn.Parameter(empty, param.requires_grad)
            params[id(param)].__dict__.update(param.__dict__)
            _share_hooks(param, params[id(param)])
    return copied(model, params, {})


def _share_hooks(param: nn.Parameter, copy: nn.Parameter) -> None:
    """So that `resolve` sees the hooks on a parameter; they never run on the copy, which has no gradient."""
    for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if param.requires_grad and getattr(param, table, None):
            setattr(copy, table, getattr(param, table))


def copied(module: nn.Module, params: dict[int, nn.Parameter], copies: dict[int, nn.Module]) -> nn.Module:
    """params, copies: by id of the original. A module that occurs twice is copied once."""
    if id(module) not in copies:
        twin: nn.Module = object.__new__(type(module))
        copies[id(module)] = twin
        # Not by assignment: a module's own __setattr__ may hand it on, as torch.compile's wrapper does to what it wraps.
        vars(twin).update({name: _owned(name, value) for name, value in vars(module).items()})
        vars(twin)["_parameters"] = {
            key: None if param is None else params[id(param)] for key, param in module._parameters.items()
        }
        vars(twin)["_buffers"] = {
            key: None if buffer is None else params.get(id(buffer), buffer) for key, buffer in module._buffers.items()
        }
        vars(twin)["_modules"] = {
            key: None if child is None else copied(child, params, copies) for key, child in module._modules.items()
        }
    return copies[id(module)]


_TABLES = frozenset(vars(nn.Module()))


def _owned(name: str, value: Any) -> Any:
    """Copies the tables that nn.Module keeps of a module, which are written to; whatever else hangs on it is only read."""
    return copy.copy(value) if name in _TABLES and isinstance(value, dict | set) else value
