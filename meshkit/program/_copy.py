"""Copies of a model's modules without the values of its tensors."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn


def without_values(model: nn.Module, *, emptied: Collection[str] = ()) -> nn.Module:
    """A copy of the modules with parameters on meta. Tied parameters stay tied; all else is shared with the model.

    emptied: modules that are copied without the parameters and modules inside. Parameters that are no plain tensors
    (quantized ones) are shared too. Its hooks are its own: those put on the model later are not on the copy, nor the other
    way.
    """
    # No deep copy: it fails on what a user's module may hold beside tensors, such as a lock, a file or a generator.
    copies = {id(module): _emptied(module) for module in map(model.get_submodule, emptied)}
    params: dict[int, nn.Parameter] = {}
    for param in model.parameters():
        params[id(param)] = param
        if type(param.data) is Tensor:
            # With its strides, which `empty_like` keeps for dense tensors only: a view is told by them.
            empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
            params[id(param)] = nn.Parameter(empty, param.requires_grad)
            params[id(param)].__dict__.update(param.__dict__)
            _share_hooks(param, params[id(param)])
    return copied(model, params, copies)


def _emptied(module: nn.Module) -> nn.Module:
    twin: nn.Module = object.__new__(type(module))
    vars(twin).update({name: _owned(name, value) for name, value in vars(module).items()})
    vars(twin).update(_parameters={}, _buffers={}, _modules={})
    return twin


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
