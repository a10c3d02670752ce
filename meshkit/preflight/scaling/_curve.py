"""Scaling curve: tokens/s and GPU-hours against ranks, each point with its own best strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from meshkit.errors import PlanError
from meshkit.preflight._format import table_lines


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """Of one strategy on some ranks: what a forecast hands over. tokens: of one step over all ranks."""

    ranks: int
    step_s: float
    tokens: int
    strategy: str = ""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.tokens < 1 or not 0 < self.step_s < inf:
            raise PlanError(f"{self}: needs at least one rank and one token, and seconds above 0.")

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s


@dataclass(frozen=True, kw_only=True)
class Point:
    """One number of ranks with its best strategy.

    goodput: useful share of the wall clock. efficiency: tokens/s of a rank over those of the curve's first point.
    """

    forecast: StepForecast
    goodput: float
    tokens_per_s: float
    efficiency: float
    hours: float
    gpu_hours: float


@dataclass(frozen=True, kw_only=True)
class ScalingCurve:
    """Points by ranks. left_out: ranks on which nothing fits. `str()` is the printed form."""

    total_tokens: float
    points: tuple[Point, ...]
    left_out: tuple[int, ...] = ()

    def within(self, hours: float) -> Point | None:
        """The point of the fewest GPU-hours that trains all tokens in so many hours."""
        fast = [point for point in self.points if point.hours <= hours]
        return min(fast, key=lambda point: point.gpu_hours, default=None)

    def __str__(self) -> str:
        rows = [("ranks", "tokens/s", "efficiency", "goodput", "hours", "GPU-hours", "strategy")]
        rows += [
            (
                f"{point.forecast.ranks:,}",
                f"{point.tokens_per_s:,.0f}",
                f"{point.efficiency:.1%}",
                f"{point.goodput:.1%}",
                format_hours(point.hours),
                format_hours(point.gpu_hours),
                point.forecast.strategy,
            )
            for point in self.points
        ]
        lines = [f"{self.total_tokens:.3g} tokens", *table_lines(rows, right=range(6))]
        if self.left_out:
            lines.append(f"no strategy fits on {', '.join(map(str, self.left_out))} ranks")
        return "\n".join(lines)


def format_hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 1000 else f"{hours:.4g}"


def scaling_curve(
    worlds: Iterable[int],
    best: Callable[[int], StepForecast | None],
    *,
    total_tokens: float,
    goodput: Callable[[StepForecast], float] | None = None,
) -> ScalingCurve:
    """Ask `best` for the best strategy of each world, None where nothing fits, and put the answers beside one another.

    goodput: useful share of the wall clock of a forecast; failures come more often on more ranks. None: 1.
    Raises: PlanError where nothing fits at all, and for a forecast of other ranks than were asked.
    """
    if not 0 < total_tokens < inf:
        raise PlanError(f"total_tokens={total_tokens:g}: give the tokens of the whole run.")
    points: list[Point] = []
    left_out = []
    asked = sorted(set(worlds))
    for ranks in asked:
        forecast = best(ranks)
        if forecast is None:
            left_out.append(ranks)
            continue
        if forecast.ranks != ranks:
            raise PlanError(f"asked for the best strategy of {ranks} ranks, and got one of {forecast.ranks}.")
        share = 1.0 if goodput is None else goodput(forecast)
        if not 0 < share <= 1:
            raise PlanError(
                f"goodput of {ranks} ranks is {share:g}: give a share of the wall clock above 0, at most 1."
            )
        tokens_per_s = forecast.tokens_per_s * share
        first = points[0] if points else None
        hours = total_tokens / tokens_per_s / 3600
        points.append(
            Point(
                forecast=forecast,
                goodput=share,
                tokens_per_s=tokens_per_s,
                efficiency=tokens_per_s / ranks * first.forecast.ranks / first.tokens_per_s if first else 1.0,
                hours=hours,
                gpu_hours=hours * ranks,
            )
        )
    if not points:
        raise PlanError(f"no strategy fits on any of {', '.join(map(str, asked)) or 'no'} ranks.")
    return ScalingCurve(total_tokens=total_tokens, points=tuple(points), left_out=tuple(left_out))
