"""What one parameter's gradient is, where it is not that of one device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from meshkit.preflight.check._finding import Kind
from meshkit.preflight.check._record import Facts, Part
from meshkit.preflight.check._reference import OneDevice
from meshkit.preflight.check._tables import Of, Table, close, differing_axes, ratio, same_region


@dataclass(frozen=True)
class Verdict:
    """What a parameter's gradient is, where it is not what it should be. sums: its sum over the axes is right."""

    kind: Kind
    axes: tuple[str, ...] = ()
    factor: float | None = None
    sums: bool = False


def judge(table: Table, one: OneDevice, name: str, expected: Tensor | None, scale: float) -> Verdict | None:
    parts = table.parts(name)
    if not any(part.trained for _, part in parts):
        return None
    whole = torch.zeros(one.shapes[name], dtype=parts[0][1].value.dtype) if expected is None else expected
    pairs = [(part.gradient, part_of(part, whole)) for _, part in parts]
    if all(
        close(part if part is not None else torch.zeros_like(want), want, table.tolerance, scale)
        for part, want in pairs
    ):
        return None
    if any(part is None for part, _ in pairs):
        return Verdict("missing gradient")
    for replicas in same_region(parts):
        values = [(facts, gradient_in(part)) for facts, part in replicas]
        axes = differing_axes(table, values, scale)
        if axes:
            want = part_of(replicas[0][1], whole)
            total = sum_over(table, values, axes)
            count = prod(table.spec.sizes()[axis] for axis in axes)
            if close(total, want, table.tolerance, scale):
                return Verdict("unreduced gradient", axes, sums=True)
            return Verdict(
                "unreduced gradient", axes, count if close(total / count, want, table.tolerance, scale) else None
            )
    factor = ratio(torch.cat([flat(part) for part, _ in pairs]), torch.cat([want.flatten() for _, want in pairs]))
    if all(close(flat(part), (want * factor).flatten(), table.tolerance, scale * abs(factor)) for part, want in pairs):
        return _scaled(table, parts, factor, module_of(name))
    if _is_of_own_rows(table, one, name):
        return Verdict("unreduced gradient", table.token_axes)
    return Verdict("wrong gradient")


def _scaled(table: Table, parts: Sequence[Of], factor: float, module: str) -> Verdict:
    if abs(factor) < table.tolerance:
        return Verdict("missing gradient")
    for kind, number in (("gradient reduced twice", factor), ("averaged gradient", 1 / factor)):
        axes = _axes_of(table, parts, number, module)
        if axes:
            return Verdict(kind, axes, factor)  # type: ignore[arg-type]  # one of the two
    return Verdict("wrong gradient", (), factor)


def _axes_of(table: Table, parts: Sequence[Of], number: float, module: str | None = None) -> tuple[str, ...]:
    """Axes of so many ranks together. Of several, those over which the module's backward, or this gradient, was sent, then
    those of whole copies.
    """
    sizes = table.spec.sizes()
    fitting = [
        axes
        for count in range(1, len(table.axes) + 1)
        for axes in combinations(table.axes, count)
        if abs(prod(sizes[axis] for axis in axes) - number) < 1e-3 * number
    ]
    facts, part = parts[0]

    def worth(axes: tuple[str, ...]) -> tuple[int, int, int, int]:
        calls = [call for call in facts.calls if call.op == "all_reduce" and call.axis == "_".join(axes)]
        sent_by_module = sum(call.module == module and call.where.endswith("(backward)") for call in calls)
        sent = sum(call.size == part.value.numel() for call in calls)
        whole = sum(
            any(table.differ_only_in(axis, facts, others) and other.region == part.region for others, other in parts)
            for axis in axes
        )
        return -len(axes), sent_by_module, sent, whole

    return max(fitting, key=worth, default=())


def _is_of_own_rows(table: Table, one: OneDevice, name: str) -> bool:
    """Whether each rank's gradient is like that of its own rows alone."""
    ranks = one.of_ranks()
    if len(ranks) < 2 or len(ranks) < len(one.rows_of_ranks):
        return False
    for facts, part in table.parts(name):
        alone = ranks[facts.place["dp_replicate"] * table.spec.dp_shard + facts.place["dp_shard"]].gradients[name]
        if alone is None or part.gradient is None:
            return False
        want = part_of(part, alone)
        factor = ratio(part.gradient, want)
        if not close(part.gradient, want * factor, table.tolerance):
            return False
    return True


def axes_by_size(table: Table, number: float) -> tuple[str, ...]:
    return _axes_of(table, [(table.facts[0], next(iter(table.facts[0].parts.values())))], number)


def sum_over(table: Table, values: Iterable[tuple[Facts, Tensor]], axes: tuple[str, ...]) -> Tensor:
    """Of the ranks that differ from the first in these axes only."""
    held = list(values)
    others = [axis for axis in table.axes if axis not in axes]
    first = held[0][0]
    return torch.stack(
        [value for facts, value in held if all(facts.place[axis] == first.place[axis] for axis in others)]
    ).sum(0)


def part_of(part: Part, whole: Tensor) -> Tensor:
    return whole[part.slices]


def gradient_in(part: Part) -> Tensor:
    assert part.gradient is not None
    return part.gradient


def flat(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.flatten()


def module_of(name: str) -> str:
    """Of a parameter."""
    return name.rpartition(".")[0]
