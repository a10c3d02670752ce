"""Pictures of an energy plan (SVG): the pipeline in time with a colour for each clock, and the time-energy front."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from html import escape
from itertools import chain

from meshkit.parallel.pipeline import Event, Paint, Row
from meshkit.parallel.pipeline import svg as pipeline_svg
from meshkit.preflight.energy._plan import EnergyPlan
from meshkit.preflight.energy._power import PowerPoint

FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
# From the fullest clock to the lowest; black letters are readable on all.
COLOURS = ((240, 146, 86), (245, 226, 150), (103, 179, 220))
PX_PER_ROW = 26  # of the shortest row
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 250, 86, 24, 44, 34
STYLE = """
.page { fill: #ffffff } .ink { fill: #24292f } .faint { fill: #57606a } .grid { stroke: #d0d7de }
.curve { fill: none; stroke: #0072b2 } .least { fill: none; stroke: #8c959f }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } .ink { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #3d444d }
.curve { stroke: #58b0e3 } }
"""


def svg(plan: EnergyPlan) -> str:
    """The step at full clock above the step of the plan, to one scale; a colour is a clock."""
    points = {
        event.row: point
        for events, rank in zip(plan.planned.events, plan.points, strict=True)
        for event, point in zip(events, rank, strict=True)
    }
    clocks = sorted({point.mhz for point in points.values()}, reverse=True)
    colours = dict(zip(clocks, _colours(len(clocks)), strict=True))
    shortest_s = min((end - start for _, start, end in chain(*plan.full.events) if end > start), default=1.0)
    per_s = PX_PER_ROW / shortest_s
    legend = tuple((colours[mhz], f"{mhz:g} MHz") for mhz in clocks)
    above = Paint(
        colour=lambda event: _colours(1)[0],
        note=lambda event: "full clock",
        legend=((_colours(1)[0], "full clock"),),
        title=f"full clock, {plan.full_joules:.5g} J",
    )
    below = Paint(
        colour=lambda event: colours[points[event.row].mhz],
        note=partial(_note, points),
        legend=legend,
        title=f"plan, {plan.joules:.5g} J, {plan.saved:.1%} saved",
    )
    return _stacked(
        pipeline_svg(plan.full, px_per_s=per_s, paint=above), pipeline_svg(plan.planned, px_per_s=per_s, paint=below)
    )


def front_svg(plans: Sequence[EnergyPlan]) -> str:
    """Joules against seconds of a step: the full clock, and the plans of `front`, with what a row may mix as a thin line."""
    full = plans[0]
    seconds = [full.full.makespan_s, *(plan.step_s for plan in plans)]
    joules = [full.full_joules, *(plan.joules for plan in plans), *(plan.least_joules for plan in plans)]
    low_s, high_s, low_j, high_j = min(seconds), max(seconds), min(joules), max(joules)
    room_s, room_j = 0.08 * (high_s - low_s or low_s or 1), 0.12 * (high_j - low_j or high_j or 1)
    low_s, high_s, low_j, high_j = low_s - room_s, high_s + room_s, low_j - room_j, high_j + room_j

    def place(step_s: float, step_joules: float) -> tuple[float, float]:
        return (
            LEFT + (step_s - low_s) / (high_s - low_s) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (step_joules - low_j) / (high_j - low_j) * (HEIGHT - TOP - BOTTOM),
        )

    heading = f"time and energy of {full.full.schedule.name}, {full.full.schedule.world} ranks"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(heading)}" {FONT}>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(10, 22, heading, size=14, css="ink"),
    ]
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        step_s, step_joules = low_s + share * (high_s - low_s), low_j + share * (high_j - low_j)
        x, y = place(step_s, step_joules)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#d0d7de"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{step_joules:.5g} J", anchor="end"))
        parts.append(_text(x, HEIGHT - BOTTOM + 18, f"{step_s:.4g} s", anchor=anchor))
    for css, values in (("least", [plan.least_joules for plan in plans]), ("curve", [plan.joules for plan in plans])):
        corners = [place(plan.step_s, value) for plan, value in zip(plans, values, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        stroke = "#0072b2" if css == "curve" else "#8c959f"
        parts.append(f'<polyline class="{css}" points="{line}" fill="none" stroke="{stroke}"/>')
    for plan in plans:
        x, y = place(plan.step_s, plan.joules)
        title = f"{plan.slowdown:.2%} slower, {plan.saved:.2%} saved"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#0072b2"><title>{title}</title></circle>')
    x, y = place(full.full.makespan_s, full.full_joules)
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#d55e00"><title>full clock</title></circle>')
    parts.append(_text(x + 9, y + 4, "full clock"))
    x, y = place(full.step_s, full.joules)
    parts.append(_text(x + 9, y - 7, f"{full.saved:.1%} saved at no slowdown" if not full.slowdown else "plan"))
    x, y = place(plans[-1].step_s, plans[-1].joules)
    if len(plans) > 1:
        parts.append(_text(x, y - 9, f"{plans[-1].saved:.1%} at {plans[-1].slowdown:.0%} slower", anchor="end"))
    return "\n".join([*parts, "</svg>"])


def _note(points: dict[Row, PowerPoint], event: Event) -> str:
    point = points[event.row]
    return f"{point.mhz:g} MHz, {point.watts:g} W"


def _colours(count: int) -> list[str]:
    found = []
    for index in range(count):
        place = index / max(1, count - 1) * (len(COLOURS) - 1)
        low = min(int(place), len(COLOURS) - 2)
        mixed = [round(a + (b - a) * (place - low)) for a, b in zip(COLOURS[low], COLOURS[low + 1], strict=True)]
        found.append("#" + "".join(f"{channel:02x}" for channel in mixed))
    return found


def _stacked(*pictures: str) -> str:
    sizes = [
        tuple(map(int, re.findall(r' (?:width|height)="(\d+)"', picture.partition(">")[0]))) for picture in pictures
    ]
    width, height = max(size[0] for size in sizes), sum(size[1] for size in sizes)
    parts, y = [], 0
    for picture, size in zip(pictures, sizes, strict=True):
        parts.append(picture.replace("<svg ", f'<svg y="{y}" ', 1))
        y += size[1]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
            f'<rect class="page" width="{width}" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>",
        ]
    )


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", css: str = "faint") -> str:
    fill = "#24292f" if css == "ink" else "#57606a"
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">'
        f"{escape(text)}</text>"
    )
