"""Thin models: a model with one block of each kind, so that equal blocks are traced once (deduplication of layers)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from meshkit.memory import Treatment
from meshkit.program import Program, read_program
from meshkit.resolve import Resolved
from meshkit.strategy import Strategy

PLAIN = (bool, int, float, str, type(None))


def kinds_of_blocks(model: nn.Module, blocks: Sequence[str], treated: Mapping[str, Hashable]) -> dict[str, str]:
    """Block -> the first block that is like it: the same modules, parameters, settings and treatment.

    A setting that differs between all blocks, as the index of a layer, makes none of them another kind.
    """
    modules = {name: model.get_submodule(name) for name in blocks}
    settings = {name: _settings(module) for name, module in modules.items()}
    values: dict[tuple[str, str], set[Any]] = {}
    for each in settings.values():
        for key, value in each.items():
            values.setdefault(key, set()).add(value)
    numbered = {key for key, seen in values.items() if len(seen) == len(blocks) > 1}
    first: dict[Hashable, str] = {}
    return {
        name: first.setdefault(
            (
                str(module),
                tuple((key, tuple(p.shape), p.dtype, p.requires_grad) for key, p in module.named_parameters()),
                tuple(sorted((key, repr(value)) for key, value in settings[name].items() if key not in numbered)),
                treated.get(name),
            ),
            name,
        )
        for name, module in modules.items()
    }


_KINDS: WeakKeyDictionary[Program, dict[tuple[str, ...], dict[str, str]]] = WeakKeyDictionary()


def alike_blocks(resolved: Resolved) -> dict[str, tuple[str, Treatment]]:
    """Block -> what it is like: the first block of the same modules, parameters and settings, and the treatment. Where two
    strategies treat other blocks of equal ones so, what was traced for the one is that of the other.
    """
    known = _KINDS.setdefault(resolved.program, {})
    blocks = tuple(resolved.blocks)
    if blocks not in known:
        known[blocks] = kinds_of_blocks(resolved.program.model, blocks, {})
    return {name: (kind, resolved.treatments[name]) for name, kind in known[blocks].items()}


def _settings(block: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (path, key): value
        for path, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, PLAIN) and key != "training"
    }


def thin(model: nn.Module, kinds: Mapping[str, str]) -> nn.Module:
    """A copy in which only the first block of each kind is left, under its name; all where blocks are in no list."""
    copied = copy.deepcopy(model)
    kept = set(kinds.values())
    for name in kinds:
        parent, _, key = name.rpartition(".")
        holder = copied.get_submodule(parent)
        if name not in kept and isinstance(holder, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            del holder._modules[key]
    return copied


_THIN: WeakKeyDictionary[Program, dict[Hashable, Program]] = WeakKeyDictionary()


def thin_program(
    resolved: Resolved, kinds: Mapping[str, str], key: Hashable, change: Callable[[nn.Module], None]
) -> Program:
    """The program of a thin copy, changed by `change`. Made once for each key, so that it is read once, too."""
    program = resolved.program
    known = _THIN.setdefault(program, {})
    # With a plan of its own the whole is proved; else the copy's is derived by proofs.
    is_proved = resolved.strategy.plan is not None and resolved.strategy.unproved != "replicate"
    made = tuple(sorted(set(kinds.values()))), len(kinds), key, is_proved
    if made not in known:
        model = thin(program.model, kinds)
        change(model)
        known[made] = replace(read_program(model, program.example), is_proved=is_proved)
    return known[made]


def step_program(
    resolved: Resolved, kinds: Mapping[str, str], inner: Strategy, *, tied: Sequence[tuple[str, str]] = ()
) -> Program:
    """The thin program of which a step is traced, its parameters in the dtype that FSDP casts them to; buffers keep theirs.

    inner: the strategy of that step. tied: parameters that stages of a pipeline use each as its own.
    """
    casts = resolved.memory.precision is not None and inner.memory.precision is None
    dtype = resolved.compute if casts else None

    def change(model: nn.Module) -> None:
        _untie(model, tied)
        for param in model.parameters() if dtype is not None else ():
            param.data = param.data.to(dtype)

    return thin_program(resolved, kinds, ("step", tuple(tied), dtype), change)


def _untie(model: nn.Module, tied: Sequence[tuple[str, str]]) -> None:
    for _, name in tied:
        owner, _, key = name.rpartition(".")
        param = model.get_submodule(owner)._parameters[key]
        assert param is not None
        model.get_submodule(owner)._parameters[key] = nn.Parameter(torch.empty_like(param), param.requires_grad)
