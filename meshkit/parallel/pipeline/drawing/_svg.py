"""Drawing a pipeline schedule on a page: SVG, or HTML with several of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor

from meshkit.parallel.pipeline._simulate import Event, Simulation
from meshkit.parallel.pipeline._table import Schedule
from meshkit.parallel.pipeline.drawing._common import (
    WORDS,
    chunks_of,
    digits,
    heading_of,
    scale_of,
    shade,
    shades_of,
    tick_step,
)

FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
LEFT, RIGHT, LANE, GAP, CURVE = 58, 74, 24, 4, 26
# Classes colour the picture for light and dark pages. Elements repeat the light colours as attributes, which rank below a
# style: viewers that ignore styles still show a picture.
STYLE = """
.page { fill: #ffffff } .ink { fill: #24292f } .faint { fill: #57606a } .grid { stroke: #d0d7de } .idle { fill: #f0f2f4 }
.curve { fill: #8250df; fill-opacity: 0.3; stroke: #8250df }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } .ink { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #3d444d } .idle { fill: #1c2129 }
.curve { fill: #a371f7; stroke: #a371f7 } }
"""


@dataclass(frozen=True, kw_only=True)
class Paint:
    """Colours of a timeline that say something else than the op, as the clock of each row; cells then say their op, too.

    colour, note: of a row, its fill and what its title adds. legend: (colour, words). title: before the numbers.
    """

    colour: Callable[[Event], str]
    note: Callable[[Event], str]
    legend: tuple[tuple[str, str], ...]
    title: str


def svg(simulation: Simulation, *, px_per_s: float | None = None, paint: Paint | None = None) -> str:
    """The timeline, one rect of class "task" per task, and under it the activations each rank holds.

    An FB row is two rects, its forward above its backward. A rect's title, which shows under the pointer, has stage,
    microbatch and times. px_per_s: the scale; by default the shortest cell has room for its number. paint: other colours.
    """
    schedule = simulation.schedule
    per_s = px_per_s if px_per_s is not None else _natural_px_per_s(simulation)
    legend, legend_width = _legend(schedule, paint)
    plot = simulation.makespan_s * per_s
    heading = heading_of(schedule)
    numbers = "" if paint is None else f"{paint.title}, "
    numbers += f"makespan {digits(simulation.makespan_s)}, bubble rate {100 * simulation.bubble_rate:.2f} %"
    # No font can be measured here: 7.4 px is about a character at size 14, as 6.2 and 6.6 are in the legend at size 12.
    width = ceil(max(LEFT + plot + RIGHT, legend_width + 16, 7.4 * len(f"{heading}    {numbers}") + 16))
    top = 62
    axis = top + schedule.world * (LANE + GAP) + 4
    memory = axis + 52
    bottom = memory + schedule.world * (CURVE + GAP)
    height = bottom + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(heading)}" {FONT}>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text class="ink" x="10" y="22" font-size="14" fill="#24292f"><tspan font-weight="600">{escape(heading)}</tspan>'
        f'<tspan class="faint" dx="14" font-size="12" fill="#57606a">{numbers}</tspan></text>',
        legend,
    ]
    for rank in range(schedule.world):
        y = top + rank * (LANE + GAP)
        stages = ", ".join(map(str, schedule.stages_of(rank)))
        parts.append(_words(LEFT - 8, y + LANE / 2 + 4, f"rank {rank}", anchor="end", title=f"stages {stages}"))
        parts.append(f'<rect class="idle" x="{LEFT}" y="{y}" width="{plot:.2f}" height="{LANE}" fill="#f0f2f4"/>')
    parts.append(_axis_svg(simulation, per_s, top, axis))
    for rank, events in enumerate(simulation.events):
        parts += _cells(events, schedule, per_s, top + rank * (LANE + GAP), paint)
    parts.append(_words(LEFT, memory - 10, "activations held", anchor="start", size=11))
    highest = max(simulation.peak_units, default=0.0)
    for rank in range(schedule.world):
        parts.append(_curve(simulation, rank, highest, per_s, memory + rank * (CURVE + GAP)))
    return "\n".join([*filter(None, parts), "</svg>"])


def html(*simulations: Simulation, title: str = "Pipeline schedules") -> str:
    """One page, nothing loaded from elsewhere: the numbers in a table, then each picture, all to one scale."""
    # One scale, the largest that any of them needs: lengths can then be compared between pictures.
    scale = max(map(_natural_px_per_s, simulations), default=1.0)
    rows = "\n".join(
        f"<tr><td>{escape(heading_of(sim.schedule))}</td><td>{digits(sim.makespan_s)}</td>"
        f"<td>{100 * sim.bubble_rate:.2f} %</td><td>{' '.join(map(digits, sim.peak_units))}</td></tr>"
        for sim in simulations
    )
    pictures = "\n".join(f"<div>{svg(sim, px_per_s=scale)}</div>" for sim in simulations)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{escape(title)}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 14px system-ui, sans-serif; margin: 16px; background: #ffffff; color: #24292f }}
div {{ overflow-x: auto; margin: 16px 0 }}
table {{ border-collapse: collapse }}
th, td {{ text-align: left; padding: 3px 16px 3px 0; border-bottom: 1px solid #8c959f55 }}
h1 {{ font-size: 18px }}
@media (prefers-color-scheme: dark) {{ body {{ background: #0d1117; color: #e6edf3 }} }}
</style>
</head>
<body>
<h1>{escape(title)}</h1>
<table>
<tr><th>schedule</th><th>makespan</th><th>bubble rate</th><th>peak activations by rank</th></tr>
{rows}
</table>
{pictures}
</body>
</html>
"""


def _cells(events: Sequence[Event], schedule: Schedule, per_s: float, y: float, paint: Paint | None) -> Iterator[str]:
    chunks, shades = chunks_of(schedule), shades_of(schedule)
    for event in events:
        row, start_s, end_s = event
        x, width = LEFT + start_s * per_s, (end_s - start_s) * per_s
        inset = 0.5 if width > 4 else 0.0
        height = LANE / len(row.tasks)
        for half, task in enumerate(row.tasks):
            top = y + half * height
            title = (
                f"{row}: {WORDS[task.op]} of microbatch {task.microbatch} through stage {task.stage}, "
                f"{digits(start_s)} to {digits(end_s)}"
            )
            fill = shade(task.op, chunks[task.stage], shades)
            # The largest size in which it fits, a digit being about 0.62 as wide as high; else none, and the title says it.
            number = str(task.microbatch)
            if paint is not None:
                title += f", {escape(paint.note(event))}"
                fill = paint.colour(event)
                number = f"{task.op}{number}"
            size = next((size for size in (11, 9, 7) if 0.62 * size * len(number) <= width and size < height), 0)
            yield (
                f"<g><title>{title}</title>"
                f'<rect class="task" x="{x + inset:.2f}" y="{top:.2f}" width="{max(width - 2 * inset, 0):.2f}" '
                f'height="{height:.2f}" fill="{fill}"/>'
                + (
                    f'<text x="{x + width / 2:.2f}" y="{top + height / 2 + 0.36 * size:.2f}" font-size="{size}" '
                    f'text-anchor="middle" fill="#000000">{number}</text>'
                    if size
                    else ""
                )
                + "</g>"
            )


def _curve(simulation: Simulation, rank: int, highest: float, per_s: float, y: float) -> str:
    levels = simulation.memory[rank]
    floor_y, scale = y + CURVE, CURVE / highest if highest else 0.0
    path = [f"M{LEFT} {floor_y}"]
    for level, later in zip(levels, [*levels[1:], None], strict=True):
        if later is not None and later.time_s == level.time_s:
            continue  # freed and taken in one instant: nothing to see
        path += [f"H{LEFT + level.time_s * per_s:.2f}", f"V{floor_y - level.units * scale:.2f}"]
    right = LEFT + simulation.makespan_s * per_s
    path += [f"H{right:.2f}", f"V{floor_y}", "Z"]
    peak = digits(simulation.peak_units[rank])
    return (
        f'<g><title>rank {rank} holds at most {peak}</title><path class="curve" d="{" ".join(path)}" '
        f'fill="#8250df" fill-opacity="0.3" stroke="#8250df"/></g>\n'
        + _words(LEFT - 8, y + CURVE / 2 + 4, f"rank {rank}", anchor="end")
        + _words(right + 8, y + CURVE / 2 + 4, f"peak {peak}", anchor="start")
    )


def _axis_svg(simulation: Simulation, per_s: float, top: float, axis: float) -> str:
    step = tick_step(56 / per_s)
    parts = []
    # 1e-9: a last tick that lies on the end must not be lost to rounding.
    for tick in range(floor(simulation.makespan_s / step + 1e-9) + 1):
        x = LEFT + tick * step * per_s
        parts.append(f'<path class="grid" d="M{x:.2f} {top - 3} V{axis}" stroke="#d0d7de"/>')
        parts.append(_words(x, axis + 13, digits(tick * step), anchor="middle", size=11))
    parts.append(_words(LEFT - 8, axis + 13, "time", anchor="end", size=11))
    return "\n".join(parts)


def _legend(schedule: Schedule, paint: Paint | None) -> tuple[str, float]:
    if paint is not None:
        return _painted_legend(paint.legend)
    shades = shades_of(schedule)
    ops = {task.op for row in schedule.rows() for task in row.tasks}
    parts, x, y = [], 10.0, 34
    for op in filter(ops.__contains__, WORDS):
        for chunk in range(shades):
            parts.append(
                f'<rect class="key" x="{x + chunk * 13}" y="{y}" width="13" height="13" fill="{shade(op, chunk, shades)}"/>'
            )
        x += 13 * shades + 5
        parts.append(_words(x, y + 11, f"{op} {WORDS[op]}", anchor="start"))
        x += 6.2 * len(f"{op} {WORDS[op]}") + 18
    if shades > 1:
        order = "light to dark: the rank's first to last stage"
        parts.append(_words(x, y + 11, order, anchor="start"))
        x += 6.6 * len(order)
    return "\n".join(parts), x


def _painted_legend(legend: Sequence[tuple[str, str]]) -> tuple[str, float]:
    parts, x, y = [], 10.0, 34
    for colour, words in legend:
        parts.append(f'<rect class="key" x="{x:.0f}" y="{y}" width="13" height="13" fill="{colour}"/>')
        parts.append(_words(x + 18, y + 11, words, anchor="start"))
        x += 36 + 6.2 * len(words)
    return "\n".join(parts), x


def _words(x: float, y: float, words: str, *, anchor: str, size: int = 12, title: str = "") -> str:
    hover = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<text class="faint" x="{x:.2f}" y="{y:.2f}" font-size="{size}" text-anchor="{anchor}" fill="#57606a">'
        f"{hover}{escape(words)}</text>"
    )


def _natural_px_per_s(simulation: Simulation) -> float:
    return scale_of(simulation, lambda row: 12 + 5 * len(str(max(row.microbatch, row.backward_microbatch))))
