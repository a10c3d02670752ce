"""Whether a model runs the same program at each call: it is called again, and what it keeps from call to call is watched.

One reading shows one call. A counter, a tensor kept of the batch before, a list that grows: what runs may depend on them, and
then nothing is known of later steps.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import nn

from meshkit.core._torch import tree_leaves
from meshkit.core.patch_class import patch_class
from meshkit.program._records import ClassRead, Draws, Operation, TensorRef, Trace, Unreadable
from meshkit.program._state import NEW, cells, same, state, view_of
from meshkit.program._watch import is_source, watched

REMEDY = "so one reading does not show what later steps do. Use dp axes only, or write it without"


def twice(model: nn.Module, read: Callable[[], Trace], *, known: bool = False) -> Trace:
    """For `trace(again=...)`: the program of the first call. known: the model was called twice before, with other arguments;
    then it is called once if nothing that it keeps has changed.

    The second call is one of a model whose modules have subclasses of their classes, as FSDP and other blocks give them.
    Raises: Unreadable for a model whose next call runs something else, or asks for a number that each call changes;
    ClassRead where that is due to the classes.
    """
    name, before = type(model).__name__, state(model)
    with _without_draws(name):
        first = read()
    changed = [
        cell
        for cell in cells(model)
        if is_source(cell.value) or not same(before.get(cell.key, NEW), view_of(cell.value))
    ]
    if known and not changed:
        return first
    labels = [cell.label for cell in changed]
    asked: list[str] = []
    for cell in changed:
        found = watched(cell.value, partial(asked.append, cell.label))
        if found is not None:
            cell.owner[cell.place] = found
    said = f" ({', '.join(labels[:3])} changed)" if labels else ""
    try:
        with _subclassed(model):
            second = read()
    except Exception as error:
        if not asked and not changed and _runs(read, first):
            raise ClassRead(name, f"the call that raises {type(error).__name__}: {error}") from error
        if asked:
            raise Unreadable(_asked(name, asked)) from error
        raise Unreadable(f"{name}: its second call raises {type(error).__name__}: {error}{said}, {REMEDY}.") from error
    if asked:
        raise Unreadable(_asked(name, asked))
    if (where := difference(first, second)) is not None:
        if not changed and _runs(read, first):
            raise ClassRead(name, where)
        raise Unreadable(f"{name}: its second call runs something else at {where}{said}, {REMEDY}.")
    return first


@dataclass(frozen=True)
class Change:
    """What makes each call of a model another one, beside tensors. module: "" for the model. drawn: of random numbers."""

    module: str
    what: str
    drawn: bool = False


def changes(model: nn.Module, read: Callable[[], Trace], *, inside: Collection[str]) -> tuple[Trace, list[Change]]:
    """For `trace(again=...)`: the program, and what makes that of a later call another one. What a first call makes and later
    ones leave as it is, as a table that is kept, is none. inside: modules whose draws of Python's random numbers are told."""
    found: dict[Change, None] = {}
    for name in {"": None, **dict.fromkeys(inside)}:
        _note_draws(model.get_submodule(name), partial(found.setdefault, Change(name, "", drawn=True)))
    first, before = read(), state(model)
    for label, module in _own_draws(model, first):
        found.setdefault(Change(module, f"depends on {label!r}, of which each call draws other random numbers"))
    second = read()
    for cell in list(cells(model)):
        if is_source(cell.value) or not same(before.get(cell.key, NEW), view_of(cell.value)):
            change = Change(cell.key[0], f"depends on {cell.label!r}, which each call changes")
            if (number := watched(cell.value, partial(found.setdefault, change))) is not None:
                cell.owner[cell.place] = number
    third = read()
    if not found and (parted := _parting(second, third)) is not None:
        found.setdefault(Change(*parted))
    return first, list(found)


def draws_by_hand(read: Trace) -> bool:
    """Whether some operator draws of a generator that it is given."""
    return any(_generators(operation) for operation in read.operations)


def _own_draws(model: nn.Module, read: Trace) -> Iterator[tuple[str, str]]:
    """(label, module) of each draw of a `torch.Generator` that modules keep, whose state neither recompute nor a second
    microbatch puts back."""
    labels: dict[int, str] = {}
    for cell in cells(model):
        for value in cell.value if isinstance(cell.value, list | tuple) else (cell.value,):
            labels.setdefault(id(value), cell.label)
    for operation in read.operations:
        for generator in _generators(operation):
            if id(generator) in labels:
                yield labels[id(generator)], read.calls[operation.call].name if operation.call >= 0 else ""


def _generators(operation: Operation) -> list[torch.Generator]:
    leaves = tree_leaves((operation.args, dict(operation.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]


@contextmanager
def same_draws() -> Iterator[None]:
    """After it, Python's and numpy's random numbers go on as if none had been drawn inside."""
    before, numpy = _drawn(), cast(Any, sys.modules.get("numpy"))
    try:
        yield
    finally:
        random.setstate(before[0])
        if before[1:]:
            numpy.random.set_state(before[1:])


def _note_draws(module: nn.Module, note: Callable[[], Any]) -> None:
    forward = module.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        before = _drawn()
        out = forward(*args, **kwargs)
        if any(map(_differ, before, _drawn())):
            note()
        return out

    module.__dict__["forward"] = noting


def _drawn() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    return (random.getstate(), *(numpy.random.get_state() if numpy else ()))


def _parting(first: Trace, second: Trace) -> tuple[str, str] | None:
    """(module, what) of the first operation that another call does not run."""
    for one, other in zip_longest(first.operations, second.operations):
        if one is None or other is None or not _alike(first, one, second, other):
            trace, operation = (first, one) if other is None else (second, other)
            name = trace.calls[operation.call].name if operation.call >= 0 else ""
            return name, f"is another at {operation.where} in each call"
    return None


def _asked(name: str, asked: list[str]) -> str:
    return f"{name}: what runs next depends on {asked[0]!r}, which each call changes, {REMEDY}."


@contextmanager
def _subclassed(model: nn.Module) -> Iterator[None]:
    """Inside, each module has a subclass of its class, under the same name."""
    before = {module: type(module) for module in model.modules()}
    try:
        for module in before:
            with suppress(TypeError):  # of a class whose objects have another layout
                patch_class(module)
        yield
    finally:
        for module, kind in before.items():
            module.__class__ = kind


def _runs(read: Callable[[], Trace], first: Trace) -> bool:
    """Whether one more call runs what the first one ran."""
    try:
        return difference(first, read()) is None
    except Exception:
        return False


def difference(first: Trace, second: Trace) -> str | None:
    """Where two programs part."""
    for one, other in zip_longest(first.operations, second.operations):
        if one is None or other is None:
            return (one or other).where
        if not _alike(first, one, second, other):
            return other.where
    return None


def _alike(first: Trace, one: Any, second: Trace, other: Any) -> bool:
    return bool(one.name == other.name and _arguments(first, one) == _arguments(second, other))


def _arguments(trace: Trace, operation: Any) -> Any:
    def leaf(value: Any) -> Any:
        if not isinstance(value, TensorRef):
            return value if isinstance(value, str | int | float | None) else type(value).__name__
        kept = trace.storages[value.storage]
        # Of a tensor that an earlier call made there is no value.
        source = (kept.source, kept.value is None) if kept.source == "constant" else kept.source
        return source, value.shape, value.stride, value.offset, value.dtype

    return tuple(map(leaf, tree_leaves((operation.args, dict(operation.kwargs)))))


@contextmanager
def _without_draws(name: str) -> Iterator[None]:
    """Raises: Unreadable where what is inside draws of Python's or numpy's random numbers: others on each rank and in each
    call."""
    numpy: Any = sys.modules.get("numpy")
    before, of_numpy = random.getstate(), numpy.random.get_state() if numpy else ()
    yield
    drawn = "Python's `random`" * (random.getstate() != before)
    if of_numpy and any(map(_differ, numpy.random.get_state(), of_numpy)):
        drawn = "`numpy.random`"
        numpy.random.set_state(of_numpy)
    if drawn:
        random.setstate(before)
        raise Draws(f"{name}: its forward draws of {drawn}, which is not the same on all ranks, {REMEDY}.")


def _differ(one: Any, other: Any) -> bool:
    return bool(one.tobytes() != other.tobytes() if hasattr(one, "tobytes") else one != other)
