"""What all ranks know, by parameter; replicas, and the axes along which they differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshkit.mesh import MeshSpec
from meshkit.preflight.check._record import Facts, Part, Region

Of = tuple[Facts, Part]
TOLERANCES = {  # relative; wrong factors and missing sums are of the size of the values
    torch.float64: 1e-5,  # models compute some things in fp32 whatever their dtype
    torch.float32: 1e-3,
}
COARSE = 5e-2  # bf16 and fp16


class Table:
    def __init__(self, facts: Sequence[Facts], spec: MeshSpec, compute: torch.dtype) -> None:
        self.facts, self.spec = list(facts), spec
        self.axes = [axis for axis, size in spec.sizes().items() if size > 1]
        self.names = list(
            dict.fromkeys(name for one in facts for name, part in one.parts.items() if part.value.numel())
        )
        dtypes = {compute, *(part.value.dtype for one in facts for part in one.parts.values())}
        self.tolerance = max(TOLERANCES.get(dtype, COARSE) for dtype in dtypes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if axis in ("dp_replicate", "dp_shard", "cp"))

    def parts(self, name: str) -> list[Of]:
        """Of every rank that holds some of it."""
        return [
            (facts, facts.parts[name])
            for facts in self.facts
            if name in facts.parts and facts.parts[name].value.numel()
        ]

    def differ_only_in(self, axis: str, one: Facts, other: Facts) -> bool:
        return one.place[axis] != other.place[axis] and all(
            one.place[name] == other.place[name] for name in self.axes if name != axis
        )


def same_region(parts: Sequence[Of]) -> list[list[Of]]:
    """Ranks that hold the same elements, together."""
    groups: dict[Region, list[Of]] = {}
    for facts, part in parts:
        groups.setdefault(part.region, []).append((facts, part))
    return list(groups.values())


def differing_axes(
    table: Table, replicas: Sequence[tuple[Facts, Tensor]], scale: float | None = None
) -> tuple[str, ...]:
    """Axes along which two ranks next to each other hold different values of what should be one. scale: see `close`."""
    return tuple(
        axis
        for axis in table.axes
        if any(
            not close(value, other, table.tolerance, scale)
            for index, (facts, value) in enumerate(replicas)
            for others, other in replicas[index + 1 :]
            if table.differ_only_in(axis, facts, others)
        )
    )


def apart(value: Tensor, expected: Tensor) -> float:
    """The largest absolute difference; infinite for other shapes and for NaN."""
    if value.shape != expected.shape:
        return float("inf")
    if not value.numel():
        return 0.0
    difference = float((value.double() - expected.double()).abs().max())
    return difference if difference == difference else float("inf")


def close(value: Tensor, expected: Tensor, bound: float, scale: float | None = None) -> bool:
    """Whether no difference is more than `bound` times the largest expected value. scale: what counts as small besides."""
    if value.shape != expected.shape:
        return False
    size = max(float(expected.abs().max()) if expected.numel() else 0.0, scale or 0.0)
    return apart(value, expected) <= bound * size


def ratio(value: Tensor, expected: Tensor) -> float:
    """The factor by which `value` is most like `expected`."""
    square = float(expected.double().square().sum())
    return float((value.double() * expected.double()).sum()) / square if square else float("nan")
