"""Power points of a device: clock (MHz), watts, slowdown; and the joules of one row as a convex function of its seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from meshkit.errors import PlanError
from meshkit.parallel.pipeline import Row


@dataclass(frozen=True, kw_only=True)
class PowerPoint:
    """One clock of a device. slowdown: time of the work there over that at the full clock, which has 1."""

    mhz: float
    watts: float
    slowdown: float


Power = Sequence[PowerPoint] | Callable[[Row], Sequence[PowerPoint]]
"""Points of every row, or a function of a row: of another device on some ranks, of forwards apart from backwards."""


class Choice(NamedTuple):
    """A row at one point. joules: beyond what the device takes anyway when it waits."""

    point: PowerPoint
    seconds: float
    joules: float


def choices(points: Sequence[PowerPoint], seconds: float, idle_watts: float) -> list[Choice]:
    """Points of a row from fast to slow, each with fewer joules than any faster one."""
    kept: list[Choice] = []
    for point in sorted(points, key=lambda point: (point.slowdown, point.watts)):
        choice = Choice(point, seconds * point.slowdown, seconds * point.slowdown * (point.watts - idle_watts))
        if not kept or choice.joules < kept[-1].joules:
            kept.append(choice)
    return kept


def convex(found: Sequence[Choice]) -> list[Choice]:
    """The lower hull: points that a mixture of two others does not beat."""
    hull: list[Choice] = []
    for choice in found:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(before: Choice, after: Choice) -> float:
    width_s = after.seconds - before.seconds
    return (after.joules - before.joules) / width_s if width_s else -inf


def refuse_points(points: Sequence[PowerPoint], idle_watts: float) -> None:
    """Raises: PlanError for numbers that are none, and where no point is the full clock."""
    if not points:
        raise PlanError("power=[]: give at least one PowerPoint, that of the full clock with slowdown=1.")
    for point in points:
        if not (0 < point.mhz < inf and 0 <= point.watts < inf and 1 <= point.slowdown < inf):
            raise PlanError(f"{point}: needs MHz above 0, watts from 0 up, and a slowdown from 1 up.")
    if min(point.slowdown for point in points) != 1:
        raise PlanError(
            f"the fastest of {len(points)} power points has a slowdown of {min(p.slowdown for p in points):g}, not 1."
        )
    if not 0 <= idle_watts < inf:
        raise PlanError(f"idle_watts={idle_watts:g}: give the watts of a device that waits, from 0 up.")
