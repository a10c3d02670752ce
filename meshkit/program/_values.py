"""Values that a forward reads of floats (`.item()`, `if x.sum() > 0`): whether they decide what it computes.

A part of the batch has other values. The forward is read with several guesses for them: where it runs the same by all, it
only looks at them, as to log or to assert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from meshkit.core import _torch
from meshkit.errors import PlanError
from meshkit.program._example import Example
from meshkit.program._guess import GUESSES, EndlessLoop, Guess
from meshkit.program._live import live
from meshkit.program._records import CLOSED, CLOSED_BY_VALUE, Fold, OnlyAlone, TensorRef, Trace, tensors
from meshkit.program._repeat import difference
from meshkit.program._trace import trace

Read = Callable[..., Trace]
_MOST = 64  # readings that raise, as an assertion lets them


def read_by_guesses(model: nn.Module, example: Example, closed: Mapping[str, str]) -> tuple[Trace, Read] | None:
    """The trace of a model that reads values of floats and does not use them, and what reads it again, as `trace` does. None
    for a model that cannot be read.

    Raises: PlanError where what it computes depends on them, with the line.
    """
    guesses = _Guesses(model, example, dict(closed))
    if (first := guesses.read(0)) is None:
        return None
    for call in first:
        guesses.closed.update(_closed(call))
    for number in range(1, len(GUESSES)) if guesses.lines else ():
        other = guesses.read(number)
        if other is None:
            return None
        if (where := _parting(first, other)) is not None:
            raise _decided(model, guesses.deciding(first, number), where)

    def again(
        model: nn.Module, args: Any, kwargs: Any, *, closed: Mapping[str, str], fold: Fold | None = None
    ) -> Trace:
        return trace(model, args, kwargs, closed=closed, fold=fold, guess=Guess(raising=guesses.raising))

    return first[0], again


class _Guesses:
    """Readings of a model by one guess after another. closed: as in `trace`."""

    def __init__(self, model: nn.Module, example: Example, closed: dict[str, str]) -> None:
        self._model, self._example, self.closed = model, example, closed
        self.raising = set[tuple[str, int]]()  # see `Guess`
        self.lines: list[str] = []  # of the last reading

    def read(self, number: int, at: Mapping[str, int] | None = None) -> tuple[Trace, Trace] | None:
        """Two calls, for what one keeps the next may use; None where all guesses raise, or what raises reads none."""
        while len(self.raising) < _MOST:
            guess, calls = Guess(number, at=at or {}, raising=self.raising), list[Trace]()

            def twice(_: nn.Module, read: Callable[[], Trace], calls: list[Trace] = calls) -> Trace:
                calls[:] = read(), read()
                return calls[0]

            try:
                trace(
                    self._model,
                    self._example.args,
                    self._example.kwargs,
                    closed=self.closed,
                    again=twice,
                    guess=guess,
                )
            except EndlessLoop as error:
                raise _decided(self._model, [error.line], "how often its loop runs") from error
            except OnlyAlone:
                raise
            except PlanError:
                given = next(reversed(guess.lines.items()), None)
                if given is None or given in self.raising:
                    return None
                self.raising.add(given)
            else:
                self.lines = list(guess.lines)
                one, other = calls
                return one, other
        return None

    def deciding(self, first: tuple[Trace, Trace], number: int) -> list[str]:
        """The lines of the last reading of which one alone, by another guess, lets the forward run otherwise; all if none."""
        lines = self.lines
        for line in lines[:_MOST]:
            other = self.read(0, {line: number})
            if other is not None and _parting(first, other) is not None:
                return [line]
        return lines


def _closed(read: Trace) -> dict[str, str]:
    """Modules whose inside was not read."""
    return {read.calls[each.call].name: each.name for each in read.operations if each.name in (CLOSED, CLOSED_BY_VALUE)}


def _parting(first: tuple[Trace, Trace], other: tuple[Trace, Trace]) -> str | None:
    """Where two programs part that were read by two guesses."""
    for one, two in zip(map(_renumbered, first), map(_renumbered, other), strict=True):
        if (where := difference(one, two)) is not None:
            return f"what runs at {where}"
        for a, b in zip(one.operations, two.operations, strict=True):
            if not all(map(_same, _constants(one, a), _constants(two, b))):
                return f"what runs at {a.where}"
        outputs = (_torch.tree_leaves(each.output) for each in (one, two))
        if any(type(a) is not type(b) or not (isinstance(a, TensorRef) or a == b) for a, b in zip_longest(*outputs)):
            return "its output"
    return None


def _renumbered(read: Trace) -> Trace:
    """Of what the output depends on alone; a value that is only looked at may let other operations run between those."""
    alive = live(read)
    numbers: dict[int, int] = {}
    for operation in alive.operations:
        for ref in tensors(operation.outputs):
            numbers.setdefault(ref.storage, len(numbers))
    storages = [
        replace(kept, source=f"op {numbers[each]}") if each in numbers and kept.source.startswith("op ") else kept
        for each, kept in enumerate(alive.storages)
    ]
    return replace(alive, storages=tuple(storages))


def _constants(read: Trace, operation: Any) -> list[torch.Tensor | None]:
    return [read.storages[ref.storage].value for ref in tensors((operation.args, dict(operation.kwargs)))]


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _decided(model: nn.Module, lines: list[str], where: str) -> PlanError:
    return PlanError(
        f"{type(model).__name__} at {', '.join(lines[:3])}: it reads values of floats, which are others of a part of the "
        f"batch, as each data rank and each microbatch has, and {where} depends on them. Compute with tensors, of each row "
        "(torch.where), or use a mesh without dp and pp and microbatches=1."
    )
