"""Guesses for the values that a forward reads of floats (`.item()`, `bool`, `.numpy()`): a tensor without values has none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle, islice
from math import inf
from types import MappingProxyType
from typing import Any

import torch

from meshkit.errors import PlanError
from meshkit.program._records import TensorRef, tensors

GUESSES = ((0.5, 0.25), (2e4, -2e4), (-2e4, 2e4), (0.0, 0.0), (0.25, 0.5), (1.0, 2.0))
"""Each given by turns: of two numbers either is the larger in one, and of two truths (above 0) either holds alone."""
_MOST = 1 << 11  # reads at one line: a loop that ends by a value may not end by a guess


class Guess:
    """What is read of floats that depend on the batch. What asks whether floats are finite gets the truth: they are. Whole
    numbers, as ids and counts, are not guessed.

    number: of `GUESSES`. at: another one, by line. raising: (line, number) after which the forward raises, as an assertion
    does: the next number is taken. lines: filled with those that read a guess -> its number; the last to read is the last.
    """

    def __init__(
        self,
        number: int = 0,
        *,
        at: Mapping[str, int] = MappingProxyType({}),
        raising: Collection[tuple[str, int]] = (),
    ) -> None:
        self._number, self._at, self._raising = number, at, raising
        self.lines: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        """Of another call, whose storages are numbered anew."""
        self._reads = Counter[str]()  # by line
        self._batch, self._floats = set[int](), set[int]()  # storages that depend on the batch, and by floats
        self._truths: dict[int, bool] = {}  # of storages that say whether floats are finite

    def follow_input(self, ref: TensorRef) -> None:
        if ref.shape:
            self._batch.add(ref.storage)
            if ref.dtype.is_floating_point or ref.dtype.is_complex:
                self._floats.add(ref.storage)

    def follow(self, op: Any, inputs: Any, outputs: Any, sources: Sequence[str]) -> None:
        """Note what the outputs of an operator depend on. sources: of storages."""
        refs = tensors(inputs)
        read = {ref.storage for ref in refs}
        if not read & self._batch:
            return
        name = "" if isinstance(op, str) else op.overloadpacket.__name__
        # A table makes floats of ids; a mask is whole numbers though it is written in floats.
        floats = read & self._floats or any(sources[each].startswith("parameter ") for each in read)
        truth = self._truth(name, inputs[0], refs)
        for out in tensors(outputs):
            self._batch.add(out.storage)
            if floats and (not _is_whole(out.dtype) or name == "_to_copy"):
                self._floats.add(out.storage)
            self._truths.pop(out.storage, None)
            if truth is not None:
                self._truths[out.storage] = truth

    def of_operator(self, op: Any, inputs: Any, line: str) -> Any:
        """What an operator returns that reads values; None where that is not guessed."""
        if torch.Tag.data_dependent_output not in op.tags:
            return None
        for ref in tensors(inputs):
            if ref.storage in self._floats:
                one = op is torch.ops.aten._local_scalar_dense.default
                return self.of_tensor(ref.storage, ref.dtype if one else torch.bool, 1, line)[0]
        return None

    def reads(self, ref: TensorRef) -> bool:
        return ref.storage in self._floats

    def of_tensor(self, storage: int, dtype: torch.dtype, count: int, line: str) -> list[Any]:
        """As many values of a tensor. Raises: EndlessLoop."""
        if storage in self._truths:
            return [self._truths[storage]] * count
        turn = self._reads.total() % 2
        self._reads[line] += 1
        if self._reads[line] > _MOST:
            raise EndlessLoop(line)
        first, most = self._at.get(line, self._number), len(GUESSES)
        numbers = [(first + step) % most for step in range(most)]
        number = next((each for each in numbers if (line, each) not in self._raising), first)
        self.lines.pop(line, None)
        self.lines[line] = number
        values = islice(cycle(GUESSES[number]), turn, turn + count)
        return [value > 0 if dtype == torch.bool else int(value) if _is_whole(dtype) else value for value in values]

    def _truth(self, name: str, args: Any, refs: Sequence[TensorRef]) -> bool | None:
        """All of what it returns, for all finite floats; isfinite is `(abs(x) != inf) * (x == x)`."""
        if name in ("isnan", "isinf"):
            return False
        if name in ("eq", "ne") and len(args) > 1 and (args[0] == args[1] or args[1] in (inf, -inf)):
            return bool(args[0] == args[1]) == (name == "eq")
        known = {self._truths.get(ref.storage) for ref in refs}
        if len(known) != 1 or name not in _OF_TRUTHS:
            return None
        (truth,) = known
        return not truth if truth is not None and name.endswith("not") else truth


_OF_TRUTHS = (
    *("all", "any", "mul", "logical_and", "logical_or", "bitwise_and", "bitwise_or"),
    *("logical_not", "bitwise_not", "_to_copy"),
)


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


class EndlessLoop(PlanError):
    """No guess ends it. line: that reads."""

    def __init__(self, line: str) -> None:
        super().__init__(f"{line}: a loop that ends by a value")
        self.line = line
