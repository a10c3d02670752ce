"""Drawing of memory over time (SVG): a step's bytes stacked by kind, one panel for each estimate, all to one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby, pairwise

from meshkit.preflight._format import format_bytes
from meshkit.preflight.estimate._result import Estimate
from meshkit.preflight.estimate._tracker import GROUPS, HOST, Point

FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
COLOURS = {
    "parameters": "#0550ae",
    "gradients": "#54aeff",
    "optimizer state": "#0a3069",
    "gathered parameters": "#1b7c83",
    "gradients in reduction": "#7fd1d6",
    "activations": "#bf8700",
    "recomputed activations": "#f2cc60",
    "logits and loss": "#cf222e",
    "work of backward": "#ff9b95",
    "other": "#8c959f",
}
STYLE = """
.page { fill: #ffffff } .ink { fill: #24292f } .faint { fill: #57606a } .grid { stroke: #d0d7de }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } .ink { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #3d444d } }
"""
LEFT, RIGHT, TOP, WIDTH, PANEL, GAP = 76, 16, 62, 720, 150, 52


def svg(estimates: Mapping[str, Estimate]) -> str:
    """estimates: by the title of each panel. From left to right are allocations, not seconds."""
    highest = max(estimate.peak_bytes for estimate in estimates.values())
    shown = [
        group
        for index, group in enumerate(GROUPS)
        if index != HOST and any(estimate.most[group] >= highest / 200 for estimate in estimates.values())
    ]
    width, height = LEFT + WIDTH + RIGHT, TOP + len(estimates) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="Memory of one rank in one optimizer step" {FONT}>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(shown),
    ]
    for index, (title, estimate) in enumerate(estimates.items()):
        parts += _panel(title, estimate, TOP + index * (PANEL + GAP) + 24, highest)
    return "\n".join([*parts, "</svg>"])


def _legend(groups: Sequence[str]) -> list[str]:
    parts, x, y = [], LEFT, 12.0
    for group in groups:
        step = 22 + 6.2 * len(group)
        if x + step > LEFT + WIDTH:
            x, y = LEFT, y + 18
        parts.append(f'<rect x="{x:.0f}" y="{y}" width="10" height="10" fill="{COLOURS[group]}"/>')
        parts.append(_text(x + 14, y + 9, group, size=11))
        x += int(step)
    return parts


def _panel(title: str, estimate: Estimate, top: float, highest: int) -> list[str]:
    points = thin(estimate.points, WIDTH)
    per_point, scale = WIDTH / max(1, len(points)), PANEL / highest
    parts = [_text(LEFT, top - 8, title, size=12, weight=600)]
    below = [0] * len(points)
    for index, group in enumerate(GROUPS):
        if index == HOST:
            continue
        above = [low + point.totals[index] for low, point in zip(below, points, strict=True)]
        if above != below:
            parts.append(_area(below, above, per_point, scale, top + PANEL, COLOURS[group], group))
        below = above
    for share in (0.5, 1.0):
        y = top + PANEL * (1 - share)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}" stroke="#d0d7de"/>')
        parts.append(_text(LEFT - 6, y + 4, format_bytes(int(highest * share)), size=10, anchor="end", css="faint"))
    peak = max(range(len(points)), key=lambda index: points[index].device_bytes)
    x, y = LEFT + (peak + 0.5) * per_point, top + PANEL - estimate.peak_bytes * scale
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="none" class="ink" stroke="#24292f"/>')
    text = f"peak {format_bytes(estimate.peak_bytes)} in the {estimate.where.removeprefix('the ')}"
    parts.append(_text(LEFT + WIDTH, top - 8, text, size=11, anchor="end", css="faint"))
    parts += _phases(points, per_point, top + PANEL)
    return parts


def _area(
    below: Sequence[int], above: Sequence[int], per_point: float, scale: float, floor: float, colour: str, title: str
) -> str:
    def corners(values: Sequence[int]) -> list[str]:
        return [
            f"{LEFT + (index + side) * per_point:.1f},{floor - value * scale:.1f}"
            for index, value in enumerate(values)
            for side in (0, 1)
        ]

    outline = " ".join([*corners(above), *reversed(corners(below))])
    return f'<polygon points="{outline}" fill="{colour}"><title>{escape(title)}</title></polygon>'


def _phases(points: Sequence[Point], per_point: float, y: float) -> list[str]:
    """Names and bounds of forwards, backwards and the optimizer step, under the panel."""
    parts, start = [], 0
    for phase, run in groupby(points, key=lambda point: _phase(point.where)):
        length = len(list(run))
        middle, wide = LEFT + (start + length / 2) * per_point, length * per_point
        if wide > 6.5 * len(phase):
            parts.append(_text(middle, y + 13, phase, size=10, anchor="middle", css="faint"))
        x = LEFT + start * per_point
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 5}" stroke="#d0d7de"/>')
        start += length
    return parts


def _phase(where: str) -> str:
    if where.startswith(("backward", "recompute")):
        return "backward"
    return "forward" if where.startswith(("forward", "the loss")) else "optimizer"


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points, each the one with most bytes of its share, so peaks stay."""
    if len(points) <= most:
        return list(points)
    edges = [round(index * len(points) / most) for index in range(most + 1)]
    return [max(points[first:after], key=lambda point: point.device_bytes) for first, after in pairwise(edges)]


def _text(
    x: float, y: float, text: str, *, size: int, anchor: str = "start", css: str = "ink", weight: int = 400
) -> str:
    fill = "#24292f" if css == "ink" else "#57606a"
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{fill}">{escape(text)}</text>'
    )
