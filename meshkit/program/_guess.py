"""Guesses for the values that a forward reads of floats (`.item()`, `bool`): a tensor without values has none."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch

from meshkit.program._records import ReadingError, TensorRef, tensors

_MOST = 1 << 10  # readings with operators between them, at one line: a loop that ends by a value may not end by a guess
_BY_VALUE = torch.Tag.data_dependent_output


class Guess:
    """What is read of floats that depend on the batch is `value`, or of truths whether that is above 0. Floats are finite, so
    what asks for that gets the truth. Whole numbers are not guessed.

    at: other values, by line. lines: filled with those that have read a guess.
    """

    def __init__(self, value: float, at: dict[str, float]) -> None:
        self._value, self._at = value, at
        self.lines: list[str] = []
        self.begin()

    def begin(self) -> None:
        """Of another reading."""
        self.lines.clear()
        self._rounds: dict[str, int] = {}
        self._last = -1
        self._batch, self._floats = set[int](), set[int]()  # storages that depend on the batch, and by floats
        self._truths: dict[int, bool] = {}  # of storages that say whether floats are finite

    def follow(self, op: Any, inputs: Any, outputs: Any, storages: Sequence[str]) -> None:
        """Note of what `outputs` depend on. storages: the source of each."""
        refs = tensors(inputs)
        read = {ref.storage for ref in refs}
        if not read & self._batch:
            return
        table = any(storages[each].startswith("parameter ") for each in read)
        truth = None if isinstance(op, str) else self._truth(op.overloadpacket.__name__, inputs[0], refs)
        for out in tensors(outputs):
            self._batch.add(out.storage)
            if out.dtype.is_floating_point or out.dtype.is_complex:
                # Not of a mask, which is whole numbers also where it is written in floats.
                if read & self._floats or table:
                    self._floats.add(out.storage)
            elif out.dtype == torch.bool and read & self._floats:
                self._floats.add(out.storage)
                if truth is not None:
                    self._truths[out.storage] = truth

    def follow_input(self, ref: TensorRef) -> None:
        if ref.shape:
            self._batch.add(ref.storage)
            if ref.dtype.is_floating_point or ref.dtype.is_complex:
                self._floats.add(ref.storage)

    def read(self, op: Any, refs: Sequence[TensorRef], line: str, operations: int) -> Any:
        """What an operator returns that reads values; None where it is not to be guessed. Raises: ReadingError for a loop."""
        if _BY_VALUE not in op.tags or not refs or any(ref.storage not in self._floats for ref in refs[:1]):
            return None
        (first, *_) = refs
        if first.storage in self._truths:
            return self._truths[first.storage]
        self.lines.append(line)
        self._rounds[line] = self._rounds.get(line, 0) + (operations != self._last)
        self._last = operations
        if self._rounds[line] > _MOST:
            raise EndlessLoop("", line, RuntimeError("a loop that ends by a value"))
        value = self._at.get(line, self._value)
        of_floats = op is torch.ops.aten._local_scalar_dense.default and first.dtype != torch.bool
        return value if of_floats else value > 0

    def _truth(self, name: str, args: Any, refs: Sequence[TensorRef]) -> bool | None:
        """Whether all of what it returns is true, or none, for all finite floats."""
        if name in ("isnan", "isinf", "isfinite"):
            return name == "isfinite"
        if name in ("eq", "ne"):
            of_itself = len(refs) == 2 and refs[0] == refs[1]
            if of_itself or (len(args) > 1 and args[1] in (inf, -inf)):
                return of_itself == (name == "eq")
            return None
        known = [self._truths.get(ref.storage) for ref in refs]
        if not known or None in known:
            return None
        if name in ("logical_not", "bitwise_not"):
            return not known[0]
        return any(known) if name in ("logical_or", "bitwise_or") else all(known) if name in _KEEPS else None


_KEEPS = (
    "all",
    "any",
    "mul",
    "logical_and",
    "bitwise_and",
    "view",
    "select",
    "slice",
    "unbind",
    "clone",
    "detach",
    "_to_copy",
)


class EndlessLoop(ReadingError):
    """No guess ends it."""
