"""The model as it was before anything was split: what every decision about it reads.

This is where the traced program enters: its operations and what lies between modules will be further fields of `Program`,
and whoever decides already asks it, not the module on a rank.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
        """The same on a copy without values, which what is done to the model leaves as it is."""
        return Program(without_values(self.model))


def read_program(model: nn.Module) -> Program:
    """The program of a model, before anything is done to it.

    Raises: PlanError for a model of which this rank holds the stages of one rank of pp only, and for one that is split over
    a mesh already or on meta in part.
    """
    if full_model_of(model) is not None:
        raise PlanError(
            f"{type(model).__name__}: this model has the stages of one rank of pp only. Give the whole one: "
            "`run.full_model`, or the model before parallelize."
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
    """A copy of the modules whose parameters are on meta; what is tied stays tied, all else is shared with the model.

    Its hooks are its own: those put on the model later are not on the copy, nor the other way.
    Not a deep copy, which fails on whatever a module of the user's may hold beside tensors: a lock, a file, a generator.
    Parameters of other kinds than plain tensors (quantised ones) are shared too.
    """
    params: dict[int, nn.Parameter] = {}
    for param in model.parameters():
        params[id(param)] = param
        if type(param.data) is Tensor:
            params[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            params[id(param)].__dict__.update(param.__dict__)
    return _copied(model, params, {})


def _copied(module: nn.Module, params: dict[int, nn.Parameter], made: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in made:
        twin: nn.Module = object.__new__(type(module))
        made[id(module)] = twin
        # Not by assignment: a module's own __setattr__ may hand it on, as torch.compile's wrapper does to what it wraps.
        vars(twin).update({name: _own(name, value) for name, value in vars(module).items()})
        vars(twin)["_parameters"] = {
            key: None if param is None else params[id(param)] for key, param in module._parameters.items()
        }
        vars(twin)["_modules"] = {
            key: None if child is None else _copied(child, params, made) for key, child in module._modules.items()
        }
    return made[id(module)]


def _own(name: str, value: Any) -> Any:
    """The tables that nn.Module keeps of a module are written to; whatever else hangs on it is only read."""
    written = name in vars(nn.Module()) and isinstance(value, dict | set)
    return copy.copy(value) if written else value
