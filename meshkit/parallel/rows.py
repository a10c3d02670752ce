"""Rows of a batch (data parallelism, microbatches): a forward that mixes them is not one of each part."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import frexp
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core.asked_once import AskedOnce, shapes
from meshkit.errors import PlanError
from meshkit.parallel.rows_tried import mixes_rows
from meshkit.parallel.writes import refuse_backwards, refuse_writes
from meshkit.program import (
    CLOSED,
    CLOSED_BY_VALUE,
    ClassRead,
    Draws,
    Example,
    Fold,
    Held,
    OnlyAlone,
    Program,
    Read,
    Trace,
    Unproved,
    differences,
    fold,
    follow_mode,
    is_number,
    kind_of_call,
    live,
    mode_of,
    prove,
    read_by_guesses,
    same_draws,
    tensors,
    trace,
    without_values,
)

_PARTS = ((0, 1), (2, 3))  # not one row: a model may treat that apart
_MOST = 8  # tensors of an output that are looked at one by one


def refuse_mixed_rows(
    program: Program,
    example: Example,
    *,
    blocks: Sequence[str],
    closed: Mapping[str, str],
    ranks: bool = True,
    first: Callable[[Trace], None] = lambda read: None,
) -> bool:
    """Whether the forward could be read. One that cannot be followed, as it sorts tokens by its own experts, is tried on
    values.

    As `look_at_rows`. Raises: PlanError for a forward that is shown to mix rows, to write parameters or to run a backward,
    with its line.
    """
    key = "rows", example.key, tuple(blocks), frozenset(closed.items()), mode_of(program.model)
    if ranks and key in program.shown:  # `first` is of microbatches alone
        return True
    looked = look_at_rows(program, example, blocks=blocks, closed=closed, ranks=ranks, first=first)
    if looked.unproved:
        try_rows(program, example)
    if ranks and looked.read:
        program.shown[key] = example.objects
    return looked.read


@dataclass(frozen=True)
class Looked:
    """read: whether the forward could be read. unproved: whether its reading says too little, so that it must be tried."""

    read: bool
    unproved: bool


def look_at_rows(
    program: Program,
    example: Example,
    *,
    blocks: Sequence[str],
    closed: Mapping[str, str],
    ranks: bool,
    first: Callable[[Trace], None],
) -> Looked:
    """What a reading alone shows.

    closed: modules whose inside is not read, as in `trace`. ranks: whether rows are split over ranks, which gather
    parameters; else they are split into microbatches alone. first: what may refuse the reading before its rows are looked at.
    Raises: PlanError as `refuse_mixed_rows`.
    """
    try:
        found = read_forward(program, of_rows(example, len(_PARTS[0])), closed)
    except ClassRead:
        if ranks:
            raise
        found = None  # what changes classes refuses it by itself
    if found is None:
        return Looked(read=False, unproved=True)
    read, again = found
    refuse_writes(read, program.model, gathered=ranks)
    first(read)
    if ranks:
        refuse_backwards(read, program.model, blocks)
    if any("c10d" in operation.name for operation in read.operations):
        return Looked(read=True, unproved=False)  # it asks the other ranks by itself
    try:
        folded = fold(read, program.modules, blocks, lambda block: None)
        try:
            _prove(program, example, folded if folded.left_out else None, closed, again, read)
        except Unproved:
            if not folded.left_out:
                raise
            _prove(program, example, None, closed, again, read)  # a model may not be told from one of fewer blocks
    except Unproved as error:
        if error.wrong:
            raise _mixed(program.model, str(error)) from error
        return Looked(read=True, unproved=True)
    except PlanError:
        return Looked(read=True, unproved=True)
    by_value = any(operation.name in (CLOSED, CLOSED_BY_VALUE) for operation in read.operations)
    return Looked(read=True, unproved=by_value)


def try_rows(program: Program, example: Example) -> None:
    """Raises: PlanError for a forward that is seen to mix rows of random values."""
    if mixes_rows(program.model, example):
        raise _mixed(
            program.model,
            "on random values, what it returns of four rows of eight is not what it returns of the four alone. It reads "
            "whole numbers that depend on all rows, or makes sizes of them (x[x > 0], nonzero).",
        )


def _mixed(model: nn.Module, why: str) -> PlanError:
    return PlanError(
        f"{type(model).__name__} mixes the rows of a batch, of which each data rank and each microbatch has a part: {why} "
        "Compute it of each row, as the loss does of each token, or use a mesh without dp and pp and microbatches=1."
    )


def read_forward(program: Program, example: Example, closed: Mapping[str, str]) -> tuple[Trace, Read] | None:
    """The trace, and what reads another; None of a model that cannot be read."""
    read: Trace | None = None
    try:
        read = program.read(example, closed)
    except OnlyAlone:
        raise
    except Draws:  # others in each reading, which may then differ by chance
        return _alike(program.model, example.args, example.kwargs, closed=closed), _alike
    except PlanError:
        pass
    if read is not None and not read.asked and all(each.name != CLOSED_BY_VALUE for each in read.operations):
        return read, trace
    by_guesses = read_by_guesses(program.model, example, closed)
    return by_guesses if by_guesses or read is None else (read, trace)


def _alike(*args: Any, **kwargs: Any) -> Trace:
    """`trace`, with the same draws of Python's random numbers in each."""
    with same_draws():
        return trace(*args, **kwargs)


class RowsGuard:
    """Before a call that trains and is of a kind that none was before: `refuse_mixed_rows` by that call. Calls of a kind have
    the same modules in training, and arguments that differ in sizes, and in numbers within a power of two.

    shown: the arguments of a kind that need not be looked at. ranks: whether rows are split over ranks; else only steps of
    several microbatches are looked at, and `first` gets the reading and their number. parts: data ranks, that have a part of
    the rows each. Each number of rows is looked at too, of a part and of all parts, see `_refuse_other_rows`.
    Wire: nothing. One rank reads for those that ask the same, see `AskedOnce`.
    """

    def __init__(
        self,
        program: Program,
        shown: Example | None,
        *,
        blocks: Sequence[str],
        closed: Mapping[str, str],
        ranks: bool,
        parts: int,
        first: Callable[[Trace, int], None],
        asked: AskedOnce,
    ) -> None:
        self._program, self._blocks, self._closed, self._ranks = program, blocks, closed, ranks
        self._parts, self._rows = parts, set[tuple[Hashable, int]]()
        self._first, self._asked = first, asked
        self._microbatches = 1
        self._looked: dict[Hashable, Example] = {} if shown is None else {_kind(program.model, shown): shown}
        self._calls: set[Hashable] = set()
        self._called: dict[Hashable, Example] = {}  # the first call of each kind, without its values
        self._foreseen = set[tuple[Hashable, int]]()

    def begin_step(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._asked.begin_step()

    def refusal(self, rows: int, microbatches: int) -> str:
        """Why a step of so many rows of this rank would be refused, if it calls the model as earlier ones did; else empty.

        Asked before the step, so that all ranks hear of it: in a call a rank raises alone, and others wait for its messages.
        """
        sizes = {max(1, rows // microbatches), max(1, -(-rows // microbatches))}  # where there are none, one stands in
        every = sorted({each * factor for each in sizes for factor in (1, microbatches * self._parts)})
        for kind, example in self._called.items() if self._ranks or microbatches > 1 else ():
            known = self._rows | self._foreseen
            if not (counts := [each for each in every if (kind, each) not in known]):
                continue
            try:
                self._refuse_counts(example, counts, kind, shapes((example.args, dict(example.kwargs))))
            except PlanError as error:
                return str(error)
            self._foreseen.update((kind, each) for each in counts)
        return ""

    def _refuse_counts(self, example: Example, counts: Sequence[int], kind: Hashable, of_call: object) -> None:
        if not counts:
            return
        question = "numbers of rows", (kind, of_call), counts
        with torch.inference_mode(False):
            self._asked.ask(question, lambda: self._look_at(example, counts, kind))

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or not (self._ranks or self._microbatches > 1):
            return
        example = Example(args, {name: value for name, value in kwargs.items() if name != "mask"})
        rows = _rows_of(example)
        call = _kind(model, example), rows, self._microbatches
        if call in self._calls or any(map(_torch.is_fake, _torch.tree_leaves((args, kwargs)))):
            return
        follow_mode(self._program.model, model)
        kind = _kind(self._program.model, example)  # on pp the program has modules that this rank has not
        of_call = shapes((args, example.kwargs))
        counts = [each for each in (rows, rows * self._microbatches * self._parts) if (kind, each) not in self._rows]
        with torch.inference_mode(False):
            if kind not in self._looked:
                looked = self._asked.ask(("rows", (kind, of_call), self._microbatches), lambda: self._look(example))
                if looked.unproved:
                    try_rows(self._program, example)
                self._looked[kind] = of_rows(example, 0)
        self._called.setdefault(kind, of_rows(example, 0))
        self._refuse_counts(example, counts, kind, of_call)
        self._rows.update((kind, each) for each in counts)
        self._calls.add(call)

    def _look(self, example: Example) -> Looked:
        return look_at_rows(
            self._program,
            example,
            blocks=self._blocks,
            closed=self._closed,
            ranks=self._ranks,
            first=lambda read: None if self._ranks else self._first(read, self._microbatches),
        )

    def _look_at(self, example: Example, counts: Sequence[int], kind: Hashable) -> None:
        _refuse_other_rows(self._program, example, counts, self._closed, self._looked[kind])


def _refuse_other_rows(
    program: Program, example: Example, counts: Iterable[int], closed: Mapping[str, str], proved: Example
) -> None:
    """proved: an example of the same kind, of which `refuse_mixed_rows` has looked at four rows and at two.

    Raises: PlanError for a forward that runs other operations on one of these numbers of rows, or computes with other
    numbers, than on four: if x.shape[0] == 1, or a squeeze() that takes a dim of one row."""
    parts = len(_PARTS[0])
    every = sum(map(len, _PARTS))
    for rows in dict.fromkeys(counts):
        if rows in (every, parts, 0):
            continue
        of_proved = _read(program, proved, parts, closed)
        if isinstance(of_proved, PlanError):
            return  # it draws other numbers in each reading, or cannot be read, and was tried on values
        found = _read(program, example, rows, closed)
        if not isinstance(found, PlanError) and not any(differences(of_proved, found)):
            continue
        # What differs may depend on the sizes beside rows, so four rows of this very call are read too.
        expected = _read(program, example, every, closed)
        if isinstance(expected, PlanError):
            return
        if expected.asked or any(operation.name == CLOSED_BY_VALUE for operation in expected.operations):
            return  # on other values it may run something else
        if isinstance(found, PlanError):
            why = str(found).rstrip(".")
            raise _mixed(
                program.model, f"of {every} rows its forward runs, and of {rows} it does not: {why}."
            ) from found
        for difference in differences(expected, found):
            at = difference.other or difference.one
            if difference.factor is not None:
                name, there, here = difference.factor
                what = f"{at} computes with {name}={here}, and of {every} with {there}"
            else:
                what = f"{at} {'runs' if difference.other is not None else 'does not run'}, unlike of {every}"
            raise _mixed(program.model, f"of {rows} rows {what}, so what it does depends on how many rows there are.")


def _read(program: Program, example: Example, rows: int, closed: Mapping[str, str]) -> Trace | PlanError:
    try:
        return program.read(of_rows(example, rows), closed)
    except PlanError as error:
        return error


def _rows_of(example: Example) -> int:
    return next(
        (leaf.shape[0] for leaf in _torch.tree_leaves((example.args, dict(example.kwargs))) if _has_rows(leaf)), 0
    )


def _kind(model: nn.Module, example: Example) -> Hashable:
    leaves = _torch.tree_leaves((example.args, dict(example.kwargs)))
    rows = [leaf.shape[0] for leaf in leaves if _has_rows(leaf)]
    numbers = [(leaf > 0, _bits(leaf)) for leaf in leaves if is_number(leaf)]
    return mode_of(model), kind_of_call(model, example), tuple(each == rows[0] for each in rows), tuple(numbers)


def _bits(number: float) -> int:
    return number.bit_length() if isinstance(number, int) else frexp(number)[1]


def _prove(
    program: Program, example: Example, folded: Fold | None, closed: Mapping[str, str], again: Read, known: Trace
) -> None:
    """known: a reading of a rank's rows, of all blocks."""

    def read(rows: int) -> Trace:
        given = of_rows(example, rows)
        model = without_values(program.model, emptied=folded.left_out if folded else ())
        present = dict(model.named_modules())
        inside = {name: operation for name, operation in closed.items() if name in present}
        return again(model, given.args, given.kwargs, closed=inside, fold=folded)

    full = read(sum(map(len, _PARTS)))
    of_rank = known if folded is None else read(len(_PARTS[0]))
    params = {f"parameter {name}": Held("replicated") for name in program.parameters}
    inputs = {kept.source for kept in of_rank.storages if kept.source.startswith("input ") and kept.shape}
    held = [params | {source: Held("varying", 0, rows) for source in inputs} for rows in _PARTS]

    def proved(*numbers: int) -> None:
        """Of some of the tensors that it returns."""
        one, other = (_only(each, numbers) for each in (full, of_rank))
        prove(one, [other] * len(_PARTS), held, tokens=_PARTS)

    returned = range(len(tensors(full.result)))
    try:
        proved(*returned)
    except Unproved as error:
        # Of what is compared across rows, as images with texts, a loss may read the parts.
        if not error.wrong or not any(_holds(proved, number) for number in returned[:_MOST]):
            raise


def _only(trace: Trace, numbers: Sequence[int]) -> Trace:
    """The trace of a model that returns those tensors alone."""
    output = [tensors(trace.result)[number] for number in numbers]
    first = replace(trace.calls[0], output=output)
    return replace(live(trace, output), calls=(first, *trace.calls[1:]), kept={})


def _holds(proved: Callable[[int], None], number: int) -> bool:
    try:
        proved(number)
    except Unproved:
        return False
    return True


def of_rows(example: Example, rows: int) -> Example:
    """The same of so many rows."""
    first = next((leaf for leaf in _torch.tree_leaves((example.args, dict(example.kwargs))) if _has_rows(leaf)), None)

    def resized(leaf: Any) -> Any:
        if first is None or not _has_rows(leaf) or leaf.shape[0] != first.shape[0]:
            return leaf
        return torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

    if first is None or first.shape[0] == rows:
        return example
    args, kwargs = _torch.tree_map(resized, (example.args, dict(example.kwargs)))
    return Example(args, kwargs)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0
