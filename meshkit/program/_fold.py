"""Folding: of blocks that are alike one is followed, and what is shown of it holds of all.

A block is left out by letting it return what the one that is kept returned: so the model is shallower. Blocks are of a kind
if the single-device model runs the same operators in them, on the same tensors from outside and on the same outputs of
blocks before, and if their modules hold the same. So a first block, which is given an embedding's output, is of a kind of its
own. What is shown of a block follows from the state of what it is given: which part a rank has, and how gradients are summed.
If all kept blocks return tensors in one state, those left out are given it too, and by induction return it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core._torch import is_container, tree_flatten
from meshkit.program._records import Fold, ModuleCall, TensorRef, Trace, tensors


def fold(
    trace: Trace,
    modules: Mapping[str, nn.Module],
    blocks: Sequence[str],
    layout: Callable[[str], Hashable],
    on_rank: Trace | None = None,
) -> Fold:
    """Which blocks are left out. layout(block): what else must be alike, such as how its parameters are split.

    on_rank: a rank's program, of all blocks, in which they must be alike too: one that asks how wide its part is may be like
    the others on one device alone.
    """
    traces = [trace] if on_rank is None else [trace, on_rank]
    programs = [_programs(each, blocks) for each in traces]
    calls = {name: key for name, key in programs[0].items() if all(name in each for each in programs)}
    kinds: dict[Hashable, list[list[str]]] = {}
    counted = False
    for number, name in enumerate(calls):
        key = (tuple(each[name] for each in programs), layout(name))
        for kind in kinds.setdefault(key, []):
            first = list(calls).index(kind[0])
            if _hold_alike(modules[kind[0]], modules[name], number - first):
                counted |= not _hold_alike(modules[kind[0]], modules[name], 0)
                kind.append(name)
                break
        else:
            kinds[key].append([name])
    left_out = {name: kind[0] for found in kinds.values() for kind in found for name in kind[1:]}
    return Fold(tuple(name for name in calls if name not in left_out), left_out, counted)


def _programs(trace: Trace, blocks: Sequence[str]) -> dict[str, Hashable]:
    returned: dict[int, int] = {}  # storages that blocks before returned -> which tensor of the output
    programs: dict[str, Hashable] = {}
    for name, call in _only_calls(trace, blocks).items():
        programs[name] = _program(trace, call, returned)
        returned |= {ref.storage: leaf for leaf, ref in enumerate(tensors(call.output))}
    return programs


def _only_calls(trace: Trace, blocks: Sequence[str]) -> dict[str, ModuleCall]:
    """Of the blocks that are called once, in the order of the calls."""
    wanted = set(blocks)
    calls: dict[str, list[ModuleCall]] = {}
    for call in trace.calls:
        if call.name in wanted:
            calls.setdefault(call.name, []).append(call)
    return {name: found[0] for name, found in calls.items() if len(found) == 1}


def _program(trace: Trace, call: ModuleCall, returned: Mapping[int, int]) -> Hashable:
    """What a block is given and runs, but for the block's own name and the blocks that its inputs come from."""
    first, last = call.operations
    numbers: dict[int, int] = {}
    sources: list[Hashable] = []

    def source(storage: int) -> Hashable:
        kept = trace.storages[storage]
        kind, _, name = kept.source.partition(" ")
        if kind == "op" and first <= int(name) < last:
            return "inside", kept.size
        if kept.value is not None:
            return "constant", str(kept.value.dtype), kept.value.view(torch.uint8).numpy().tobytes()
        if name.startswith(f"{call.name}."):
            return kind, name[len(call.name) :], kept.shape
        if storage in returned:
            return "a block's output", returned[storage], kept.size
        return "outside", storage

    def leaf(value: Any) -> Hashable:
        if isinstance(value, TensorRef):
            if value.storage not in numbers:
                numbers[value.storage] = len(numbers)
                sources.append(source(value.storage))
            return numbers[value.storage], value.shape, value.stride, value.offset, value.dtype, value.requires_grad
        return value if isinstance(value, Hashable) and type(value).__module__ == "builtins" else type(value).__name__

    def tree(value: Any) -> Hashable:
        kind = type(value)
        if kind is tuple or kind is list:
            return kind, tuple(map(tree, value))
        if kind is dict:
            return kind, tuple(value), tuple(map(tree, value.values()))
        if not is_container(kind):
            return leaf(value)
        leaves, spec = tree_flatten(value)
        return (str(spec), *map(leaf, leaves))

    def inner(number: int) -> str:
        return trace.calls[number].name[len(call.name) :] if number >= 0 else ""

    program = [tree((call.args, dict(call.kwargs)))]
    for operation in trace.operations[first:last]:
        given = tree((operation.args, dict(operation.kwargs), operation.outputs))
        program.append((operation.name, inner(operation.call), operation.grad_mode, given))
    program.append(tree(call.output))
    return tuple(program), tuple(sources)


def _hold_alike(one: nn.Module, other: nn.Module, apart: int) -> bool:
    """Whether two blocks hold the same: classes and attributes. What tensors they hold is seen in what they run.

    apart: how many blocks the second comes after the first; numbers that count blocks differ so.
    """
    mine, theirs = dict(one.named_modules()), dict(other.named_modules())
    if mine.keys() != theirs.keys():
        return False
    for name, module in mine.items():
        found = theirs[name]
        if type(module) is not type(found) or vars(module).keys() != vars(found).keys():
            return False
        if not all(_alike(key, value, vars(found)[key], apart) for key, value in vars(module).items()):
            return False
    return True


def _alike(key: str, value: Any, found: Any, apart: int) -> bool:
    if value is found or key in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        return True
    if type(value) is not type(found):
        return False
    if isinstance(value, Tensor | nn.Module):
        return True
    if isinstance(value, int) and not isinstance(value, bool):
        return found in (value, value + apart)
    if isinstance(value, FunctionType):
        mine, theirs = _held_by(value), _held_by(found)
        # Nothing counts blocks here: what a function of one block is told by a number is its own.
        alike = len(mine) == len(theirs) and all(_alike("", a, b, 0) for a, b in zip(mine, theirs, strict=True))
        return value.__code__ is found.__code__ and alike
    try:
        return bool(value == found)
    except (RuntimeError, ValueError, TypeError):  # of tensors or arrays inside
        return False


def _held_by(function: FunctionType) -> list[Any]:
    """What a function reads beside its arguments and its module's names."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    return [*defaults, *(cell.cell_contents for cell in function.__closure__ or ())]
