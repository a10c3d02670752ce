"""Values that a forward reads of floats (`.item()`, `if x.sum() > 0`): whether they decide what it computes.

A part of the batch has other values. The forward is read with several guesses for them: where it runs the same, it only looks
at them, as to log or to assert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from meshkit.core import _torch
from meshkit.errors import PlanError
from meshkit.program._example import Example
from meshkit.program._guess import EndlessLoop, Guess
from meshkit.program._live import live
from meshkit.program._records import CLOSED, CLOSED_BY_VALUE, Fold, TensorRef, Trace, tensors
from meshkit.program._repeat import difference
from meshkit.program._trace import trace

Read = Callable[..., Trace]
_GUESSES = (0.5, -3.25, 1e4, 0.0)
_MOST = 16  # readings that raise, as an assertion does by a guess


def read_by_guesses(model: nn.Module, example: Example, closed: Mapping[str, str]) -> Read | None:
    """`trace` for a model that reads values of floats and does not use them; None where that cannot be told.

    Raises: PlanError where what it computes depends on them, with the line.
    """
    at: dict[str, float] = {}
    for _ in range(len(_GUESSES)):
        found: list[tuple[Trace, list[str]]] = []
        for value in _GUESSES:
            if (read := _read(model, example, closed, value, at)) is None:
                return None
            found.append(read)
        kinds = [_closed(read) for read, _ in found]
        if all(kind == kinds[0] for kind in kinds):
            break
        closed = {name: operation for kind in kinds for name, operation in kind.items()} | dict(closed)
    else:
        return None
    first, lines = found[0]
    for other, _ in found[1:]:
        if (where := _parts(first, other)) is not None:
            raise _decided(model, lines, where)

    def reading(
        model: nn.Module, args: Any, kwargs: Any, *, closed: Mapping[str, str], fold: Fold | None = None
    ) -> Trace:
        return trace(model, args, kwargs, closed=closed, fold=fold, guess=Guess(_GUESSES[0], at))

    return reading


def _read(
    model: nn.Module, example: Example, closed: Mapping[str, str], value: float, at: dict[str, float]
) -> tuple[Trace, list[str]] | None:
    """The trace by a guess, and the lines that read it. at: gets other guesses for lines after which the forward raises."""
    for _ in range(_MOST):
        guess = Guess(value, at)
        try:
            return trace(model, example.args, example.kwargs, closed=closed, guess=guess), list(guess.lines)
        except EndlessLoop as error:
            raise _decided(model, guess.lines[-1:], "how often its loop runs") from error
        except PlanError:
            line = guess.lines[-1] if guess.lines else None
            left = _GUESSES[_GUESSES.index(at[line]) + 1 :] if line in at else _GUESSES
            if line is None or not left:
                return None
            at[line] = left[0]
    return None


def _closed(read: Trace) -> dict[str, str]:
    """Modules whose inside was not read."""
    return {read.calls[each.call].name: each.name for each in read.operations if each.name in (CLOSED, CLOSED_BY_VALUE)}


def _parts(first: Trace, other: Trace) -> str | None:
    """Where two programs part that were read by two guesses."""
    first, other = live(first), live(other)
    if (where := difference(first, other)) is not None:
        return f"what runs at {where}"
    for one, two in zip(first.operations, other.operations, strict=True):
        if not all(map(_same, _constants(first, one), _constants(other, two))):
            return f"what runs at {one.where}"
    outputs = (_torch.tree_leaves(each.output) for each in (first, other))
    if any(type(a) is not type(b) or not (isinstance(a, TensorRef) or a == b) for a, b in zip_longest(*outputs)):
        return "its output"
    return None


def _constants(read: Trace, operation: Any) -> list[torch.Tensor | None]:
    return [read.storages[ref.storage].value for ref in tensors((operation.args, dict(operation.kwargs)))]


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _decided(model: nn.Module, lines: list[str], where: str) -> PlanError:
    at = ", ".join(list(dict.fromkeys(lines))[:3])
    return PlanError(
        f"{type(model).__name__} at {at}: it reads values of floats, which are others of a part of the batch, as each data "
        f"rank and each microbatch has, and {where} depends on them. Compute with tensors, of each row (torch.where), or use "
        "a mesh without dp and pp."
    )
