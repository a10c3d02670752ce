"""Drawing of a scaling curve (SVG): tokens/s and GPU-hours against ranks, both on axes of powers of two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import log2

from meshkit.preflight.scaling._curve import Point, ScalingCurve

FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
PANEL, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 270, 84, 26, 52, 42
STYLE = """
.page { fill: #ffffff } .ink { fill: #24292f } .faint { fill: #57606a } .grid { stroke: #d0d7de } .ideal { stroke: #8c959f }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } .ink { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #3d444d } }
"""


def svg(curve: ScalingCurve) -> str:
    """Two panels; the dashed line is what ranks would do if none was lost to communication, bubbles and failures."""
    first = curve.points[0]
    panels = (
        ("tokens/s", lambda point: point.tokens_per_s, lambda ranks: first.tokens_per_s * ranks / first.forecast.ranks),
        (f"GPU-hours of {curve.total_tokens:.3g} tokens", lambda point: point.gpu_hours, lambda ranks: first.gpu_hours),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * PANEL}" height="{HEIGHT}" viewBox="0 0 {2 * PANEL} {HEIGHT}" '
        f'role="img" aria-label="Scaling curve" {FONT}>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{2 * PANEL}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for index, (title, value_of, ideal) in enumerate(panels):
        parts += _panel(curve.points, title, value_of, ideal, index * PANEL)
    return "\n".join([*parts, "</svg>"])


def _panel(
    points: Sequence[Point],
    title: str,
    value_of: Callable[[Point], float],
    ideal: Callable[[float], float],
    left: float,
) -> list[str]:
    ranks = [point.forecast.ranks for point in points]
    shown = [*map(value_of, points), *map(ideal, ranks)]
    low_x, high_x = log2(ranks[0]), max(log2(ranks[-1]), log2(ranks[0]) + 1)
    low_y, high_y = log2(min(shown)) - 0.15, log2(max(shown)) + 0.25

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + LEFT + (log2(x) - low_x) / (high_x - low_x) * (PANEL - LEFT - RIGHT),
            HEIGHT - BOTTOM - (log2(y) - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM),
        )

    parts = [_text(left + LEFT, 30, title, css="ink", size=13)]
    for value in (2**low_y, 2 ** ((low_y + high_y) / 2), 2**high_y):
        _, y = place(ranks[0], value)
        parts.append(f'<path class="grid" d="M{left + LEFT} {y:.1f}H{left + PANEL - RIGHT}" stroke="#d0d7de"/>')
        parts.append(_text(left + LEFT - 8, y + 4, _short(value), anchor="end"))
    line = " ".join("{:.1f},{:.1f}".format(*place(count, ideal(count))) for count in ranks)
    parts.append(f'<polyline class="ideal" points="{line}" fill="none" stroke="#8c959f" stroke-dasharray="4 4"/>')
    line = " ".join("{:.1f},{:.1f}".format(*place(point.forecast.ranks, value_of(point))) for point in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#0072b2"/>')
    told_x = -100.0
    for point in points:
        x, y = place(point.forecast.ranks, value_of(point))
        hint = f"{point.forecast.ranks:,} ranks: {value_of(point):,.6g}; {point.forecast.strategy}"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#0072b2"><title>{escape(hint)}</title></circle>')
        if x - told_x > 44:  # labels of ranks that lie close would run into one another
            parts.append(_text(x, HEIGHT - BOTTOM + 18, f"{point.forecast.ranks:,}", anchor="middle"))
            told_x = x
    parts.append(
        _text(left + LEFT + (PANEL - LEFT - RIGHT) / 2, HEIGHT - BOTTOM + 34, "ranks", anchor="middle", size=11)
    )
    return parts


def _short(value: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.3g}"


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", css: str = "faint") -> str:
    fill = "#24292f" if css == "ink" else "#57606a"
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">'
        f"{escape(text)}</text>"
    )
