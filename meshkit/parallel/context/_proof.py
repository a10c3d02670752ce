"""Proofs at the first forward: what a rank's model is called with may be another program than the one that was proved."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core.asked_once import shapes
from meshkit.parallel.context._doors import Doors
from meshkit.parallel.context._reading import Call, Reader
from meshkit.parallel.context._split_mask import SplitMask
from meshkit.program import Covered, Example, follow_mode, is_number, kind_of_call, mode_of


class Proofs:
    """A hook before a split model's forward: proves it once for each kind of call, and again for numbers among its arguments
    beyond those that were seen; and reads it again on more tokens, or fewer, than it was read on. All ranks come to the
    same end, for they have the same batch, and one reads for those that ask the same, see `AskedOnce`.

    Wire: nothing.
    """

    def __init__(self, reader: Reader, doors: Doors, proved: Call | None) -> None:
        self.reader, self.doors = reader, doors
        self._known: dict[Hashable, Covered] = {}  # by kind of call: of numbers
        # Fewest and most tokens that each kind of call was looked at with.
        self._sizes: dict[Hashable, tuple[int, int]] = {}
        self._rows: dict[Hashable, set[int]] = {}  # that each kind of call was looked at with
        if proved is not None:
            numbers = _numbers(proved)
            self._known[_kind(reader.program.model, proved)] = Covered(numbers, numbers)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("mask")
        if not isinstance(mask, SplitMask) or any(map(_torch.is_fake, _torch.tree_leaves((args, kwargs)))):
            return
        rest = {name: value for name, value in kwargs.items() if name != "mask"}
        call = Call(args, rest, mask.tokens, mask.given, mask.batch_rows)
        kind, numbers = _kind(model, call), _numbers(call)
        known = self._known.get(kind)
        if known is None or not known.covers(numbers):
            follow_mode(self.reader.program.model, model)
            self._prove(call)
            known = self._known.setdefault(kind, Covered(numbers, numbers))
            if not known.covers(numbers):  # not each number of a step
                rounded = known.rounded_up(_without_tensors(call))
                further = replace(
                    call, args=_numbered(call.args, rounded.args), kwargs=_numbered(call.kwargs, rounded.kwargs)
                )
                self._prove(further)
                known.cover(numbers)
                known.cover(_numbers(further))
        rows = mask.rows or next((leaf.shape[0] for leaf in _torch.tree_leaves((args, rest)) if _has_rows(leaf)), 1)
        if rows not in (seen := self._rows.setdefault(kind, {1})):
            self._ask(("cp rows", rows), call, lambda: self.reader.refuse_other_rows(self.doors, call, rows=rows))
            seen.add(rows)
        counts = {mask.row_tokens, *mask.layout.lengths}
        least, most = self._sizes.get(kind, (min(counts) + 1, 0))
        if min(counts) < least or max(counts) > most:
            tokens, lengths = mask.row_tokens, sorted(set(mask.layout.lengths))
            self._ask(
                ("cp tokens", tokens, lengths),
                call,
                lambda: self.reader.refuse_other_programs(self.doors, call, tokens=tokens, lengths=lengths),
            )
            self._sizes[kind] = min(least, *counts), max(most, *counts)

    def _prove(self, call: Call) -> None:
        self._ask(("cp",), call, lambda: self.reader.prove(self.doors, call))

    def _ask(self, question: tuple[object, ...], call: Call, answer: Callable[[], None]) -> None:
        of_call = shapes((call.args, dict(call.kwargs))), call.tokens, sorted(call.given), call.rows
        self.reader.asked.ask((*question, mode_of(self.reader.program.model), of_call), answer)


def _kind(model: nn.Module, call: Call) -> Hashable:
    return kind_of_call(model, Example(call.args, call.kwargs)), call.given & {"position_ids", "attention_mask"}


def _numbers(call: Call) -> tuple[float, ...]:
    return tuple(leaf for leaf in _torch.tree_leaves((call.args, dict(call.kwargs))) if is_number(leaf))


def _without_tensors(call: Call) -> Example:
    args, kwargs = _torch.tree_map(lambda leaf: leaf if is_number(leaf) else None, (call.args, dict(call.kwargs)))
    return Example(args, kwargs)


def _numbered(tree: Any, numbers: Any) -> Any:
    """The tree with other numbers."""
    each = iter(_torch.tree_leaves(numbers))

    def leaf(value: Any) -> Any:
        number = next(each)
        return number if is_number(value) else value

    return _torch.tree_map(leaf, dict(tree) if isinstance(tree, dict) else tree)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 1
