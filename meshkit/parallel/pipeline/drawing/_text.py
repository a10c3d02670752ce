"""Drawing a pipeline schedule in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import ceil, floor
from typing import TYPE_CHECKING, NamedTuple

from meshkit.parallel.pipeline._simulate import Simulation
from meshkit.parallel.pipeline._table import Row, Schedule, label_of, lane_name
from meshkit.parallel.pipeline.drawing._common import (
    chunks_of,
    digits,
    heading_of,
    scale_of,
    shade,
    shades_of,
    tick_step,
)

if TYPE_CHECKING:
    from rich.text import Text


def summary(simulation: Simulation) -> str:
    """One line of numbers: makespan, bubble rate, and the peak of activations on every rank."""
    schedule = simulation.schedule
    peaks = " ".join(map(digits, simulation.peak_units))
    return (
        f"{heading_of(schedule)}: makespan {digits(simulation.makespan_s)}, "
        f"bubble rate {simulation.bubble_rate:.4f}, peak activations by rank {peaks}"
    )


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

    shades = shades_of(simulation.schedule)
    lines = []
    for line in _text_lines(simulation, width):
        parts = []
        for piece in line:
            # The colour behind a cell shows its length, which plain text draws.
            style = f"#000000 on {shade(piece.op, piece.chunk, shades)}" if piece.op else ""
            parts.append((piece.text.replace("━", " "), style))
        lines.append(Text.assemble(*parts))
    return Text("\n").join(lines)


class _Cell(NamedTuple):
    row: Row
    start: int  # columns, the end not included
    end: int
    label: str


def _text_lines(simulation: Simulation, width: int) -> Iterator[list[_Piece]]:
    schedule = simulation.schedule
    name = lane_name(schedule.world)
    per_s = scale_of(simulation, lambda row: 1 + len(label_of(row, schedule)))
    lanes = [
        [
            _Cell(row, round(start_s * per_s), round(end_s * per_s), label_of(row, schedule))
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

        # Reversed: of cuts that lose equally much the latest, so that lines are full.
        cuts.append(min(reversed(window), key=lost))
    return [*cuts, max(total, 1)]


def _lane(cells: Sequence[_Cell], schedule: Schedule, cuts: Sequence[int], low: int, high: int) -> Iterator[_Piece]:
    chunks = chunks_of(schedule)
    column = low
    for row, start, end, label in cells:
        left, right = max(start, low), min(end, high)
        if left >= right:
            continue
        yield _Piece(" " * (left - column))
        column = right
        if (left, right) != (start, end):  # a cell that goes on in another block wears its label in its longest part
            spans = pairwise([start, *(cut for cut in cuts if start < cut < end), end])
            if max(spans, key=lambda span: span[1] - span[0]) != (left, right):
                label = ""
        size = right - left
        # A blank column ends a cell, so that neighbours of one colour stay apart without colours too.
        gap = right == end and size > 1
        body = f"{label:━<{size - gap}}"[:size]
        split = body.find("+") if row.op == "FB" and "+" in body else len(body)
        yield _Piece(body[:split], row.tasks[0].op, chunks[row.stage])
        yield _Piece(body[split:], row.tasks[-1].op, chunks[row.tasks[-1].stage])
        yield _Piece(" " * (size - len(body)))


def _axis_text(margin: int, per_s: float, low: int, high: int) -> str:
    step = tick_step(10 / per_s)
    line = [" "] * (margin + high - low + 12)
    for tick in range(ceil(low / per_s / step - 1e-9), floor(high / per_s / step + 1e-9) + 1):
        column = margin + round(tick * step * per_s) - low
        number = digits(tick * step)
        if column + len(number) <= margin + high - low or tick == 0:
            line[column : column + len(number)] = number
    return f"{'time':{margin}}" + "".join(line)[margin:]
