"""Flows of batches of other sizes, of those that were read: rows of every length would else be read in every step.

A number of a flow (of a shape, a stride, or an int that a module is given) is taken to be a constant times a product of the
batch's sizes, as its readings show. What cannot be told so is read again. A stage that hands on something else than was told
refuses it, and what another stage returned has no values, so a wrong guess is never a number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, combinations_with_replacement
from typing import Any

from meshkit.core import _torch
from meshkit.parallel.pipeline._flow import Flow
from meshkit.program import TensorRef

READINGS = 3  # of different sizes: two that tell, and one that says the same
DEGREE = 3  # of a product: a mask's stride is rows times tokens times tokens
MOST = 6  # of one kind of batch that are remembered; from then on a model is one that cannot be told
PLAIN = (bool, float, str, type(None))

Sizes = tuple[int, ...]
Samples = tuple[int, ...]  # one number of the flow, in each reading


@dataclass(frozen=True)
class Term:
    """factor times the sizes of these groups."""

    factor: Fraction
    groups: tuple[int, ...]


class Readings:
    """Flows that were read for batches that differ in sizes alone."""

    def __init__(self) -> None:
        self.sizes: list[Sizes] = []
        self._flows: list[Flow] = []
        self._numbers: list[Samples] = []

    def add(self, sizes: Sizes, flow: Flow) -> None:
        if len(self.sizes) == MOST:
            return
        self.sizes.append(sizes)
        self._flows.append(flow)
        self._numbers.append(tuple(_numbers(flow)))
        for told in ("_groups", "_terms"):
            vars(self).pop(told, None)

    def infer(self, sizes: Sizes) -> Flow | None:
        """The flow for these sizes; None where the readings do not tell it."""
        if len(self.sizes) < READINGS or self._terms is None:
            return None
        groups = [{sizes[position] for position in positions} for positions in self._groups.values()]
        if any(len(group) > 1 for group in groups):
            return None  # sizes that were alike are so no more
        values = [group.pop() for group in groups]
        constants = [index for index, seen in enumerate(self._groups) if len(set(seen)) == 1]
        if any(values[index] != list(self._groups)[index][0] for index in constants):
            return None  # a size that has never changed
        numbers = [_value(term, values) for term in self._terms]
        if None in numbers:
            return None
        each = iter(numbers)
        return _mapped(self._flows[0], lambda _: next(each))  # type: ignore[arg-type,return-value]

    @cached_property
    def _groups(self) -> dict[Samples, list[int]]:
        """Positions in `sizes` that were always alike, by what they were."""
        groups: dict[Samples, list[int]] = {}
        for position, seen in enumerate(zip(*self.sizes, strict=True)):
            groups.setdefault(seen, []).append(position)
        return groups

    @cached_property
    def _terms(self) -> list[Term] | None:
        """What each number of the flow is. None where one cannot be told, or may be several things."""
        if len({_skeleton(flow) for flow in self._flows}) > 1:
            return None
        varying = [(index, seen) for index, seen in enumerate(self._groups) if len(set(seen)) > 1]
        known: dict[Samples, Term | None] = {}
        terms: list[Term] = []
        for samples in zip(*self._numbers, strict=True):
            if samples not in known:
                known[samples] = _term(samples, varying)
            term = known[samples]
            if term is None:
                return None
            terms.append(term)
        return terms


def _term(samples: Samples, varying: Sequence[tuple[int, Samples]]) -> Term | None:
    if len(set(samples)) == 1:
        return Term(Fraction(samples[0]), ())
    found = []
    for groups in chain.from_iterable(
        combinations_with_replacement(varying, degree) for degree in range(1, DEGREE + 1)
    ):
        factors = set()
        for reading, number in enumerate(samples):
            product = 1
            for _, seen in groups:
                product *= seen[reading]
            factors.add(Fraction(number, product) if product else None)
        if len(factors) == 1 and None not in factors:
            found.append(Term(factors.pop(), tuple(index for index, _ in groups)))  # type: ignore[arg-type]
    return found[0] if len(found) == 1 else None


def _value(term: Term, values: Sequence[int]) -> int | None:
    value = term.factor
    for group in term.groups:
        value *= values[group]
    return int(value) if value.denominator == 1 else None


# ------------------------------------------------------------------------------------------------- numbers of a flow


def _numbers(flow: Flow) -> list[int]:
    numbers: list[int] = []

    def keep(number: int) -> int:
        numbers.append(number)
        return number

    _mapped(flow, keep)
    return numbers


def _mapped(flow: Flow, change: Callable[[int], int]) -> Flow:
    """The flow with every number changed; in one order."""

    def leaf(value: Any) -> Any:
        if isinstance(value, TensorRef):
            shape, stride = tuple(map(change, value.shape)), tuple(map(change, _plain_strides(value)))
            return replace(value, shape=shape, stride=stride, offset=change(value.offset))
        return change(value) if type(value) is int else value

    calls = tuple(
        replace(
            call,
            args=_torch.tree_map(leaf, call.args),
            kwargs=_torch.tree_map(leaf, dict(call.kwargs)),
            output=_torch.tree_map(leaf, call.output),
        )
        for call in flow.calls
    )
    given = tuple(map(leaf, flow.given))
    return replace(flow, calls=calls, refs={value: leaf(ref) for value, ref in flow.refs.items()}, given=given)


def _plain_strides(ref: TensorRef) -> list[int]:
    """With those of dims of one element, which could be any, as in a contiguous tensor."""
    strides: list[int] = []
    after = 1
    for size, stride in zip(reversed(ref.shape), reversed(ref.stride), strict=True):
        strides.append(after if size == 1 else stride)
        after = size * strides[-1]
    return strides[::-1]


def _skeleton(flow: Flow) -> Hashable:
    """All of a flow but its numbers."""
    calls = []
    for call in flow.calls:
        leaves, tree = _torch.tree_flatten((call.args, dict(call.kwargs), call.output))
        calls.append((call.name, str(tree), tuple(map(_kind, leaves))))
    return tuple(calls), flow.cuts, tuple(flow.refs), flow.written, flow.between, tuple(map(_kind, flow.given))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, TensorRef):
        return leaf.storage, len(leaf.shape), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, PLAIN) else type(leaf)
