"""Verdict on one parameter's gradient: unreduced, summed twice, averaged, missing, or wrong in another way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from meshkit.preflight.check._finding import Kind
from meshkit.preflight.check._record import Facts, Shard
from meshkit.preflight.check._reference import OneDevice
from meshkit.preflight.check._tables import RankShard, Table, close, differing_axes, ratio, same_region


@dataclass(frozen=True)
class Verdict:
    """How a parameter's gradient differs from that of one device. sums: its sum over the axes is right."""

    kind: Kind
    axes: tuple[str, ...] = ()
    factor: float | None = None
    sums: bool = False


def judge(table: Table, reference: OneDevice, name: str, expected: Tensor | None, scale: float) -> Verdict | None:
    shards = table.shards(name)
    if not any(shard.trained for _, shard in shards):
        return None
    full = torch.zeros(reference.shapes[name], dtype=shards[0][1].value.dtype) if expected is None else expected
    pairs = [(shard.gradient, expected_shard(shard, full)) for _, shard in shards]
    if all(
        close(shard if shard is not None else torch.zeros_like(want), want, table.tolerance, scale)
        for shard, want in pairs
    ):
        return None
    if any(shard is None for shard, _ in pairs):
        return Verdict("missing gradient")
    for replicas in same_region(shards):
        values = [(facts, gradient_in(shard)) for facts, shard in replicas]
        axes = differing_axes(table, values, scale)
        if axes:
            want = expected_shard(replicas[0][1], full)
            total = sum_over(table, values, axes)
            count = prod(table.spec.sizes()[axis] for axis in axes)
            if close(total, want, table.tolerance, scale):
                return Verdict("unreduced gradient", axes, sums=True)
            return Verdict(
                "unreduced gradient", axes, count if close(total / count, want, table.tolerance, scale) else None
            )
    factor = ratio(torch.cat([flat(shard) for shard, _ in pairs]), torch.cat([want.flatten() for _, want in pairs]))
    if all(
        close(flat(shard), (want * factor).flatten(), table.tolerance, scale * abs(factor)) for shard, want in pairs
    ):
        return _scaled(table, shards, factor, module_of(name))
    if _is_unreduced_over_data(table, reference, name):
        return Verdict("unreduced gradient", table.token_axes)
    return Verdict("wrong gradient")


def _scaled(table: Table, shards: Sequence[RankShard], factor: float, module: str) -> Verdict:
    if abs(factor) < table.tolerance:
        return Verdict("missing gradient")
    for kind, number in (("gradient reduced twice", factor), ("averaged gradient", 1 / factor)):
        axes = _axes_of(table, shards, number, module)
        if axes:
            return Verdict(kind, axes, factor)  # type: ignore[arg-type]  # one of the two
    return Verdict("wrong gradient", (), factor)


def _axes_of(table: Table, shards: Sequence[RankShard], number: float, module: str | None = None) -> tuple[str, ...]:
    """The axes whose sizes multiply to `number`. If several do: fewest axes first, then those over which the module's
    backward or this gradient was all-reduced, then those along which the parameter is replicated.
    """
    sizes = table.spec.sizes()
    fitting = [
        axes
        for count in range(1, len(table.axes) + 1)
        for axes in combinations(table.axes, count)
        if abs(prod(sizes[axis] for axis in axes) - number) < 1e-3 * number
    ]
    facts, shard = shards[0]

    def worth(axes: tuple[str, ...]) -> tuple[int, int, int, int]:
        calls = [call for call in facts.calls if call.op == "all_reduce" and call.axis == "_".join(axes)]
        sent_by_module = sum(call.module == module and call.where.endswith("(backward)") for call in calls)
        sent = sum(call.size == shard.value.numel() for call in calls)
        copies = sum(
            any(
                table.differ_only_in(axis, facts, other_facts) and replica.region == shard.region
                for other_facts, replica in shards
            )
            for axis in axes
        )
        return -len(axes), sent_by_module, sent, copies

    return max(fitting, key=worth, default=())


def _is_unreduced_over_data(table: Table, reference: OneDevice, name: str) -> bool:
    """Whether the gradient of each rank is proportional to that of its own rows alone."""
    ranks = reference.of_ranks()
    if len(ranks) < 2 or len(ranks) < len(reference.rows_of_ranks):
        return False
    for facts, shard in table.shards(name):
        alone = ranks[facts.coordinate["dp_replicate"] * table.spec.dp_shard + facts.coordinate["dp_shard"]].gradients[
            name
        ]
        if alone is None or shard.gradient is None:
            return False
        want = expected_shard(shard, alone)
        factor = ratio(shard.gradient, want)
        if not close(shard.gradient, want * factor, table.tolerance):
            return False
    return True


def axes_by_size(table: Table, number: float) -> tuple[str, ...]:
    return _axes_of(table, [(table.facts[0], next(iter(table.facts[0].shards.values())))], number)


def sum_over(table: Table, values: Iterable[tuple[Facts, Tensor]], axes: tuple[str, ...]) -> Tensor:
    """The sum over the ranks that differ from the first one in these axes only."""
    facts_and_values = list(values)
    fixed_axes = [axis for axis in table.axes if axis not in axes]
    first = facts_and_values[0][0]
    return torch.stack(
        [
            value
            for facts, value in facts_and_values
            if all(facts.coordinate[axis] == first.coordinate[axis] for axis in fixed_axes)
        ]
    ).sum(0)


def expected_shard(shard: Shard, full: Tensor) -> Tensor:
    return full[shard.slices]


def gradient_in(shard: Shard) -> Tensor:
    assert shard.gradient is not None
    return shard.gradient


def flat(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.flatten()


def module_of(name: str) -> str:
    """The module that holds a parameter."""
    return name.rpartition(".")[0]
