"""Pictures of a schedule: text for a terminal, SVG and HTML for a page, a trace for chrome://tracing and Perfetto.

Each is a string made from a `Simulation`. Time goes to the right, one lane per rank; a colour is an op, a shade is the
chunk (the first, second, ... stage of the rank). Numbers are in the unit of the `Times` that were simulated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, pairwise
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any, NamedTuple

from meshkit.parallel.pipeline._simulate import Event, Simulation
from meshkit.parallel.pipeline._table import Row, Schedule, Task

if TYPE_CHECKING:
    from rich.text import Text

# Okabe and Ito's palette, which colour-blind readers tell apart; black digits are readable on every shade of it.
COLOURS = {"F": (86, 180, 233), "B": (213, 94, 0), "I": (230, 159, 0), "W": (0, 158, 115)}
WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

Measured = tuple[int, Task | Row, float, float]
"""(rank, what it did, start and end in seconds) on a clock that all ranks share. A Row is for FB: one name, one slice."""


def summary(simulation: Simulation) -> str:
    """One line of numbers: makespan, bubble rate, and the peak of activations on every rank."""
    schedule = simulation.schedule
    peaks = " ".join(map(_number, simulation.peak_units))
    return (
        f"{_heading(schedule)}: makespan {_number(simulation.makespan_s)}, "
        f"bubble rate {simulation.bubble_rate:.4f}, peak activations by rank {peaks}"
    )


# ---------------------------------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class _Piece:
    """Part of a line of text: `op` and `chunk` give its colour, op "" has none."""

    text: str
    op: str = ""
    chunk: int = 0


def text(simulation: Simulation, *, width: int = 100) -> str:
    """Lanes of cells in time, at most `width` characters wide: a long timeline continues in blocks below.

    A cell is what `str(row)` says, without the stage where every rank has one. It is as long as it takes.
    """
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in _text_lines(simulation, width))


def coloured(simulation: Simulation, *, width: int = 100) -> Text:
    """The same for a `rich` console: the colours and shades of the other pictures behind the cells."""
    from rich.text import Text

    shades = _shades(simulation.schedule)
    lines = []
    for line in _text_lines(simulation, width):
        parts = []
        for piece in line:
            style = f"#000000 on {_shade(piece.op, piece.chunk, shades)}" if piece.op else ""
            parts.append((piece.text.replace("━", " "), style))
        lines.append(Text.assemble(*parts))
    return Text("\n").join(lines)


def table_text(schedule: Schedule, *, at: tuple[int, int] | None = None, width: int = 100) -> str:
    """The table itself, a column per cell, not in time; for a table that may not run.

    at: (rank, index) of the cell that gets an arrow; the columns and the four ranks to either side of it are drawn.
    """
    cells = [[_label(row, schedule) for row in rank] for rank in schedule.ranks]
    rank_at, index_at = at or (0, 0)
    longest = max(map(len, cells), default=0)
    name = _lane_name(schedule.world)
    size = 1 + max([*map(len, chain(*cells)), len(str(longest))])
    columns = max(1, (width - len(name(0))) // size)
    low = max(0, min(index_at - columns // 2, longest - columns))
    shown = range(low, min(longest, low + columns))
    lines = [f"{'cell':{len(name(0)) - 2}}  " + "".join(f"{index:<{size}}" for index in shown)]
    for rank, row in enumerate(cells):
        if at is not None and abs(rank - rank_at) > 4:
            continue
        lines.append(name(rank) + "".join(f"{label:<{size}}" for label in row[shown.start : shown.stop]))
        if at is not None and rank == rank_at:
            lines.append(" " * (len(name(0)) + (index_at - low) * size) + "^")
    return "\n".join(line.rstrip() for line in lines)


class _Cell(NamedTuple):
    row: Row
    start: int  # columns, the end not included
    end: int
    label: str


def _text_lines(simulation: Simulation, width: int) -> Iterator[list[_Piece]]:
    schedule = simulation.schedule
    name = _lane_name(schedule.world)
    per_s = _scale(simulation, lambda row: 1 + len(_label(row, schedule)))
    lanes = [
        [
            _Cell(row, round(start_s * per_s), round(end_s * per_s), _label(row, schedule))
            for row, start_s, end_s in rank
        ]
        for rank in simulation.events
    ]
    cuts = _cuts(list(chain(*lanes)), max(1, width - len(name(0))))
    for low, high in pairwise(cuts):
        if low:
            yield [_Piece("")]
        for rank, cells in enumerate(lanes):
            yield [_Piece(name(rank)), *_lane(cells, schedule, cuts, low, high)]
        yield [_Piece(_axis_text(len(name(0)), per_s, low, high))]


def _cuts(cells: Sequence[_Cell], columns: int) -> list[int]:
    """Where a timeline of at most `columns` in a line is cut: late, and where the fewest cells lose their label."""
    total = max((cell.end for cell in cells), default=0)
    cuts = [0]
    while cuts[-1] + columns < total:
        latest = cuts[-1] + columns
        window = range(max(cuts[-1] + 1, latest - columns // 4), latest + 1)
        near = [cell for cell in cells if cell.start < latest and cell.end > window.start]

        def lost(cut: int, near: Sequence[_Cell] = near) -> tuple[int, int]:
            crossed = [cell for cell in near if cell.start < cut < cell.end]
            return sum(max(cut - cell.start, cell.end - cut) < len(cell.label) for cell in crossed), len(crossed)

        cuts.append(min(reversed(window), key=lost))
    return [*cuts, max(total, 1)]


def _lane(cells: Sequence[_Cell], schedule: Schedule, cuts: Sequence[int], low: int, high: int) -> Iterator[_Piece]:
    chunks = _chunks(schedule)
    column = low
    for row, start, end, label in cells:
        left, right = max(start, low), min(end, high)
        if left >= right:
            continue
        yield _Piece(" " * (left - column))
        column = right
        if (left, right) != (start, end):  # a cell that goes on in another block wears its label in its longest part
            parts = pairwise([start, *(cut for cut in cuts if start < cut < end), end])
            if max(parts, key=lambda part: part[1] - part[0]) != (left, right):
                label = ""
        size = right - left
        gap = right == end and size > 1
        body = f"{label:━<{size - gap}}"[:size]
        split = body.find("+") if row.op == "FB" and "+" in body else len(body)
        yield _Piece(body[:split], row.tasks[0].op, chunks[row.stage])
        yield _Piece(body[split:], row.tasks[-1].op, chunks[row.tasks[-1].stage])
        yield _Piece(" " * (size - len(body)))


def _axis_text(margin: int, per_s: float, low: int, high: int) -> str:
    step = _tick_step(10 / per_s)
    line = [" "] * (margin + high - low + 12)
    for tick in range(ceil(low / per_s / step - 1e-9), floor(high / per_s / step + 1e-9) + 1):
        column = margin + round(tick * step * per_s) - low
        number = _number(tick * step)
        if column + len(number) <= margin + high - low or tick == 0:
            line[column : column + len(number)] = number
    return f"{'time':{margin}}" + "".join(line)[margin:]


# ----------------------------------------------------------------------------------------------------------------- SVG

FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
LEFT, RIGHT, LANE, GAP, CURVE = 58, 74, 24, 4, 26
STYLE = """
.page { fill: #ffffff } .ink { fill: #24292f } .faint { fill: #57606a } .grid { stroke: #d0d7de } .idle { fill: #f0f2f4 }
.curve { fill: #8250df; fill-opacity: 0.3; stroke: #8250df }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } .ink { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #3d444d } .idle { fill: #1c2129 }
.curve { fill: #a371f7; stroke: #a371f7 } }
"""


def svg(simulation: Simulation, *, px_per_s: float | None = None) -> str:
    """The timeline, one rect of class "task" per task, and under it the activations each rank holds.

    An FB row is two rects, its forward above its backward. A rect's title, which shows under the pointer, has stage,
    microbatch and times. px_per_s: the scale; by default the shortest cell has room for its number.
    """
    schedule = simulation.schedule
    per_s = px_per_s if px_per_s is not None else _natural_px_per_s(simulation)
    legend, legend_width = _legend(schedule)
    plot = simulation.makespan_s * per_s
    heading = _heading(schedule)
    numbers = f"makespan {_number(simulation.makespan_s)}, bubble rate {100 * simulation.bubble_rate:.2f} %"
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
        parts += _cells(events, schedule, per_s, top + rank * (LANE + GAP))
    parts.append(_words(LEFT, memory - 10, "activations held", anchor="start", size=11))
    highest = max(simulation.peak_units, default=0.0)
    for rank in range(schedule.world):
        parts.append(_curve(simulation, rank, highest, per_s, memory + rank * (CURVE + GAP)))
    return "\n".join([*filter(None, parts), "</svg>"])


def html(*simulations: Simulation, title: str = "Pipeline schedules") -> str:
    """One page, nothing loaded from elsewhere: the numbers in a table, then each picture, all to one scale."""
    scale = max(map(_natural_px_per_s, simulations), default=1.0)
    rows = "\n".join(
        f"<tr><td>{escape(_heading(one.schedule))}</td><td>{_number(one.makespan_s)}</td>"
        f"<td>{100 * one.bubble_rate:.2f} %</td><td>{' '.join(map(_number, one.peak_units))}</td></tr>"
        for one in simulations
    )
    pictures = "\n".join(f"<div>{svg(one, px_per_s=scale)}</div>" for one in simulations)
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


def _cells(events: Sequence[Event], schedule: Schedule, per_s: float, y: float) -> Iterator[str]:
    chunks, shades = _chunks(schedule), _shades(schedule)
    for row, start_s, end_s in events:
        x, width = LEFT + start_s * per_s, (end_s - start_s) * per_s
        inset = 0.5 if width > 4 else 0.0
        height = LANE / len(row.tasks)
        for part, task in enumerate(row.tasks):
            top = y + part * height
            title = (
                f"{row}: {WORDS[task.op]} of microbatch {task.microbatch} through stage {task.stage}, "
                f"{_number(start_s)} to {_number(end_s)}"
            )
            number = str(task.microbatch)
            size = next((size for size in (11, 9, 7) if 0.62 * size * len(number) <= width and size < height), 0)
            yield (
                f"<g><title>{title}</title>"
                f'<rect class="task" x="{x + inset:.2f}" y="{top:.2f}" width="{max(width - 2 * inset, 0):.2f}" '
                f'height="{height:.2f}" fill="{_shade(task.op, chunks[task.stage], shades)}"/>'
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
    peak = _number(simulation.peak_units[rank])
    return (
        f'<g><title>rank {rank} holds at most {peak}</title><path class="curve" d="{" ".join(path)}" '
        f'fill="#8250df" fill-opacity="0.3" stroke="#8250df"/></g>\n'
        + _words(LEFT - 8, y + CURVE / 2 + 4, f"rank {rank}", anchor="end")
        + _words(right + 8, y + CURVE / 2 + 4, f"peak {peak}", anchor="start")
    )


def _axis_svg(simulation: Simulation, per_s: float, top: float, axis: float) -> str:
    step = _tick_step(56 / per_s)
    parts = []
    for tick in range(floor(simulation.makespan_s / step + 1e-9) + 1):
        x = LEFT + tick * step * per_s
        parts.append(f'<path class="grid" d="M{x:.2f} {top - 3} V{axis}" stroke="#d0d7de"/>')
        parts.append(_words(x, axis + 13, _number(tick * step), anchor="middle", size=11))
    parts.append(_words(LEFT - 8, axis + 13, "time", anchor="end", size=11))
    return "\n".join(parts)


def _legend(schedule: Schedule) -> tuple[str, float]:
    shades = _shades(schedule)
    ops = {task.op for row in schedule.rows() for task in row.tasks}
    parts, x, y = [], 10.0, 34
    for op in filter(ops.__contains__, WORDS):
        for chunk in range(shades):
            parts.append(
                f'<rect class="key" x="{x + chunk * 13}" y="{y}" width="13" height="13" fill="{_shade(op, chunk, shades)}"/>'
            )
        x += 13 * shades + 5
        parts.append(_words(x, y + 11, f"{op} {WORDS[op]}", anchor="start"))
        x += 6.2 * len(f"{op} {WORDS[op]}") + 18
    if shades > 1:
        order = "light to dark: the rank's first to last stage"
        parts.append(_words(x, y + 11, order, anchor="start"))
        x += 6.6 * len(order)
    return "\n".join(parts), x


def _words(x: float, y: float, words: str, *, anchor: str, size: int = 12, title: str = "") -> str:
    hover = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<text class="faint" x="{x:.2f}" y="{y:.2f}" font-size="{size}" text-anchor="{anchor}" fill="#57606a">'
        f"{hover}{escape(words)}</text>"
    )


# --------------------------------------------------------------------------------------------------------------- trace


def trace(simulation: Simulation | None = None, measured: Iterable[Measured] = ()) -> str:
    """JSON for chrome://tracing and ui.perfetto.dev: a process per rank, with a lane "simulated" and a lane "measured".

    Names are those of the table (`3B0`), so a search finds both. Each lane starts at 0.
    """
    ranks: set[int] = set()
    events: list[dict[str, Any]] = []
    if simulation is not None:
        for rank, rows in enumerate(simulation.events):
            ranks.add(rank)
            events += [_slice(rank, 0, *event) for event in rows]
            events += [
                {
                    "ph": "C",
                    "name": "activations",
                    "pid": rank,
                    "ts": _microseconds(level.time_s),
                    "args": {"held": level.units},
                }
                for level in simulation.memory[rank]
            ]
    seen = list(measured)
    origin_s = min((start_s for _, _, start_s, _ in seen), default=0.0)
    for rank, what, start_s, end_s in seen:
        ranks.add(rank)
        events.append(_slice(rank, 1, what, start_s - origin_s, end_s - origin_s))
    lanes = [(0, "simulated")] * (simulation is not None) + [(1, "measured")] * bool(seen)
    names: list[dict[str, Any]] = []
    for rank in sorted(ranks):
        names.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        names.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        names += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}} for lane, name in lanes
        ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": names + events})


# What the trace viewer calls its colours; Perfetto colours by name and ignores them.
TRACE_COLOURS = {
    "F": "thread_state_running",
    "B": "terrible",
    "I": "thread_state_iowait",
    "W": "good",
    "FB": "rail_animation",
}


def _slice(rank: int, lane: int, what: Task | Row, start_s: float, end_s: float) -> dict[str, Any]:
    tasks = what.tasks if isinstance(what, Row) else (what,)
    return {
        "ph": "X",
        "name": str(what),
        "cat": what.op,
        "pid": rank,
        "tid": lane,
        "ts": _microseconds(start_s),
        "dur": _microseconds(end_s - start_s),
        "cname": TRACE_COLOURS[what.op],
        "args": {f"{WORDS[task.op]} of": f"microbatch {task.microbatch} through stage {task.stage}" for task in tasks},
    }


# -------------------------------------------------------------------------------------------------------------- common


def _heading(schedule: Schedule) -> str:
    counts = [(schedule.world, "rank"), (schedule.stages, "stage"), (schedule.microbatches, "microbatch")]
    if schedule.stages == schedule.world:
        del counts[1]
    words = [
        f"{count} {noun if count == 1 else noun + ('es' if noun.endswith('h') else 's')}" for count, noun in counts
    ]
    return ", ".join([schedule.name, *words])


def _label(row: Row, schedule: Schedule) -> str:
    if schedule.stages > schedule.world:
        return str(row)
    return "+".join(f"{task.op}{task.microbatch}" for task in row.tasks)


def _chunks(schedule: Schedule) -> list[int]:
    """Of every stage: how many stages its rank has before it."""
    return [schedule.placement[:stage].count(rank) for stage, rank in enumerate(schedule.placement)]


def _shades(schedule: Schedule) -> int:
    return 1 + max(_chunks(schedule), default=0)


def _shade(op: str, chunk: int, shades: int) -> str:
    white = 0.2 if shades == 1 else 0.62 * (1 - chunk / (shades - 1))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in COLOURS[op])


def _lane_name(world: int) -> Callable[[int], str]:
    digits = len(str(world - 1))
    return lambda rank: f"rank {rank:>{digits}} │"


def _scale(simulation: Simulation, room: Callable[[Row], float]) -> float:
    """Units of length per second that give every row the room it asks for, but no row more than about three times that."""
    longest = max((event.end_s - event.start_s for event in chain(*simulation.events)), default=0.0)
    if not longest:
        return 1.0
    return max(room(row) / max(end_s - start_s, longest / 3) for row, start_s, end_s in chain(*simulation.events))


def _natural_px_per_s(simulation: Simulation) -> float:
    return _scale(simulation, lambda row: 12 + 5 * len(str(max(row.microbatch, row.backward_microbatch))))


def _tick_step(at_least: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(at_least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= at_least * (1 - 1e-9))


def _number(value: float) -> str:
    return f"{value:.6g}"


def _microseconds(time_s: float) -> float:
    return round(time_s * 1e6, 3)
