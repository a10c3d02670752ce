"""Copies of a model's modules without the values of its tensors."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from enum import Enum
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from meshkit.program._watch import is_source


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
    top = copied(model, params, copies)
    _ORIGINALS[top] = originals(model)
    return top


def follow_mode(copy: nn.Module, running: nn.Module) -> None:
    """Let each module of a copy be in training where that of `running` is. One that `running` has not follows what is around
    it, when that changes."""
    modules = dict(running.named_modules())
    before = {name: module.training for name, module in copy.named_modules()}
    for name, module in copy.named_modules():
        near = name
        while near not in modules:
            near = near.rpartition(".")[0]
        if near == name or modules[near].training != before[near]:
            module.training = modules[near].training


def mode_of(model: nn.Module) -> tuple[bool, ...]:
    """Which modules are in training. It is asked before each call: no more than a walk over the modules."""
    modes, left, seen = list[bool](), [model], set[int]()
    for module in left:
        if id(module) not in seen:
            seen.add(id(module))
            modes.append(module.training)
            left += [each for each in module._modules.values() if each is not None]  # whose truth may be its length
    return tuple(modes)


def originals(model: nn.Module) -> dict[int, ref[nn.Parameter]]:
    """The parameters of a model and of what it is a copy of, by id."""
    return {**_ORIGINALS.get(model, {}), **{id(param): ref(param) for param in model.parameters()}}


_ORIGINALS: WeakKeyDictionary[nn.Module, dict[int, ref[nn.Parameter]]] = WeakKeyDictionary()


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
    """params, copies: by id of the original. A module that occurs twice is copied once.

    What a module has in lists, dicts, bound methods, partials and closures is followed to the copies too.
    """
    given = dict(copies)
    top = _copied(module, params, copies)
    pointers = _Pointers({**params, **copies})
    for key, twin in copies.items():
        if key in given:
            continue
        for name, value in vars(twin).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                vars(twin)[name] = pointers.to_copies(value)
    return top


def _copied(module: nn.Module, params: dict[int, nn.Parameter], copies: dict[int, nn.Module]) -> nn.Module:
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
            key: None if child is None else _copied(child, params, copies) for key, child in module._modules.items()
        }
    return copies[id(module)]


def pointed_at(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """(module, its attribute, parameter) for each parameter of the model that a module has in a list, dict, partial or
    closure, beside the module whose parameter it is.
    """
    names = {id(param): name for name, param in model.named_parameters(remove_duplicate=False)}
    for owner, module in model.named_modules():
        for attribute, value in vars(module).items():
            # torch's recurrent layers keep a list that follows whatever their parameters are set to.
            follows = attribute == "_flat_weights" and isinstance(module, nn.RNNBase)
            if attribute not in ("_parameters", "_buffers", "_modules") and not follows:
                for each in _leaves(value, set()):
                    if id(each) in names:
                        yield owner, attribute, names[id(each)]


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, str | int | float | torch.dtype | nn.Module | None) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | set | deque | dict) and len(value) <= _LONGEST:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each, seen)
    elif isinstance(value, partial):
        yield from _leaves((value.func, value.args, value.keywords), seen)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            for each in _contents(cell):
                yield from _leaves(each, seen)


_LONGEST = 4096  # a list of more holds data, as a tokenizer's words


class _Pointers:
    """Turns what points at modules and parameters into what points at their copies. Lists and dicts are copied, for a forward
    may add to them.
    """

    def __init__(self, copies: dict[int, Any]) -> None:
        self._copies = copies  # by id of the original
        self._alive: list[Any] = []  # an id of what is freed would be given to another

    def to_copies(self, value: Any) -> Any:
        if isinstance(value, str | int | float | torch.dtype | None):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if type(value) in (list, dict, OrderedDict, set, deque) and len(value) <= _LONGEST:
            # Before what it holds: it may hold itself.
            made = self._remember(value, value.copy())
            made.clear()
            if isinstance(value, dict):
                made.update({self.to_copies(key): self.to_copies(each) for key, each in value.items()})
            elif isinstance(value, set):
                made.update(map(self.to_copies, value))
            else:
                made.extend(map(self.to_copies, value))
            return made
        if type(value) is tuple:
            turned = tuple(map(self.to_copies, value))
            return turned if any(a is not b for a, b in zip(turned, value, strict=True)) else value
        if type(value) is ref:
            target = value()
            twin = self.to_copies(target)
            return value if twin is target else ref(twin)
        if isinstance(value, MethodType):
            turned = self.to_copies(value.__self__)
            return value if turned is value.__self__ else MethodType(value.__func__, turned)
        if type(value) is partial:
            function, args = self.to_copies(value.func), self.to_copies(value.args)
            keywords = {key: self.to_copies(each) for key, each in value.keywords.items()}
            same = function is value.func and args is value.args
            same = same and all(each is value.keywords[key] for key, each in keywords.items())
            return value if same else partial(function, *args, **keywords)
        if type(value) is FunctionType and value.__closure__:
            return self._function(value)
        return self._state(value)

    def _state(self, value: Any) -> Any:
        """Of what a forward may change beside lists and dicts: counters, records, generators of random numbers. What these
        point at stays what it is: a parameter that is reached by one is refused where it is read."""
        if isinstance(value, torch.Generator):
            return self._copies.get(id(value)) or self._remember(value, value.clone_state())
        if not isinstance(value, _STATES) and not is_source(value) and not is_record(value):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        try:
            # A copy of numpy's generators shares their state.
            how = copy.deepcopy if type(value).__module__.startswith("numpy.") else copy.copy
            made = self._remember(value, how(value))
        except Exception:  # as a file or a generator raises
            return value
        if isinstance(made, list):
            made[:] = map(self._state, value)
        elif isinstance(made, dict):
            for key, each in list(made.items()):
                dict.__setitem__(made, key, self._state(each))
        for key, each in vars(made).items() if is_record(made) else ():
            vars(made)[key] = self._state(each)
        return made

    def _function(self, value: FunctionType) -> FunctionType:
        """With a closure of its own where that points at a module; else the same function, which what is alike is told by."""
        assert value.__closure__ is not None
        if not any(id(each) in self._copies for cell in value.__closure__ for each in _held(cell)):
            return value
        cells = tuple(CellType() for _ in value.__closure__)
        made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        made.__dict__.update(value.__dict__)
        self._remember(value, made)  # before its closure, which may hold it
        for cell, old in zip(cells, value.__closure__, strict=True):
            for each in _contents(old):
                cell.cell_contents = self.to_copies(each)
        return made

    def _remember(self, value: Any, made: Any) -> Any:
        self._copies[id(value)] = made
        self._alive.append(value)
        return made


_STATES = (list, dict, set, deque)
_SHARED = ("torch", "meshkit", "transformers", "builtins", "threading", "logging", "multiprocessing", "concurrent")


def is_record(value: Any) -> bool:
    """An object with attributes, of a class that is neither torch's nor one of models' settings, which are only read."""
    if isinstance(value, type | ModuleType | FunctionType | MethodType | partial | Enum | nn.Module | Tensor):
        return False
    return hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _SHARED


def _contents(cell: CellType) -> Iterator[Any]:
    """What a closure's cell holds, if anything yet."""
    try:
        yield cell.cell_contents
    except ValueError:
        return


def _held(cell: CellType) -> Iterator[Any]:
    """What a cell holds, and what that holds: a list's elements, or what a method is bound to."""
    for value in _contents(cell):
        yield value
        if isinstance(value, list | tuple | set | deque):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, MethodType):
            yield value.__self__
        elif isinstance(value, partial):
            yield from (value.func, *value.args)


_TABLES = frozenset(vars(nn.Module()))


def _owned(name: str, value: Any) -> Any:
    """Copies the tables that nn.Module keeps of a module, which are written to; whatever else hangs on it is only read."""
    return value.copy() if name in _TABLES and isinstance(value, dict | set) else value
