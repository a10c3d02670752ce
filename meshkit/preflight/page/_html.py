"""The page as one HTML file: sections from top to bottom, style sheet and script, and nothing loaded from elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from meshkit.errors import PlanError
from meshkit.parallel.pipeline import simulate
from meshkit.parallel.pipeline.drawing import svg
from meshkit.preflight._format import format_bytes
from meshkit.preflight.page._sections import (
    axis_table,
    chip,
    colour,
    memory_bars,
    memory_in_time,
    memory_table,
    mesh_grid,
    message_table,
    notes,
    parameter_table,
)

if TYPE_CHECKING:
    from meshkit.preflight.page._page import Page, RankGroup

# Content-Security-Policy: the browser refuses to load anything from anywhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
TIMES = "At equal times of forward, input gradient and weight gradient, and messages that take none."


def refuse_no_file(path: Path, *, flag: str) -> None:
    """Before what is to be written there is computed. Raises: PlanError where no file can be: no such folder, or a folder."""
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise PlanError(f"{flag} {path}: {what}. Give the path of a file in a folder that is there.")


def save_html(page: Page, path: str | os.PathLike[str]) -> None:
    """One file that loads nothing."""
    Path(path).write_text(html(page), encoding="utf-8")


def html(page: Page) -> str:
    """One file, light and dark. Without scripts, as on paper, it shows rank 0."""
    columns = "two" if page.is_complete else "one"
    mesh = f'<div class="{columns}"><div>{mesh_grid(page)}</div><div>{_each(page, axis_table)}</div></div>'
    sections = [
        _section("mesh", "The mesh, and what rank <b class='chosen'>0</b> sends on each axis", mesh),
        _memory(page),
        _timeline(page),
        _section("messages", "Messages of rank <b class='chosen'>0</b> in one step", _each(page, message_table)),
        _section("parameters", "Parameters of rank <b class='chosen'>0</b>", _each(page, parameter_table)),
        _section("notes", "Notes", _each(page, notes)),
    ]
    axes = {axis: {"colour": colour(axis), "groups": groups} for axis, groups in page.axes.items()}
    data = {"axes": axes, "alike": page.group_of_rank}
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(page.title)}: {escape(page.axes_text)}</title>
<style>
{_file("page.css")}</style>
</head>
<body>
{_header(page)}
{"".join(sections)}
<script type="application/json" id="data">{json.dumps(data, separators=(",", ":"))}</script>
<script>
{_file("page.js")}</script>
</body>
</html>
"""


@cache
def _file(name: str) -> str:
    return files("meshkit.preflight.page").joinpath(name).read_text(encoding="utf-8")


def _header(page: Page) -> str:
    tiles = [
        ("ranks", str(page.spec.world_size), page.axes_text),
        ("parameters", short_count(page.parameters), f"{page.parameters:,}"),
        ("tokens of a rank in a step", f"{page.rows * page.seq_len:,}", _rows(page)),
    ]
    fullest = page.fullest
    if fullest is not None and fullest.estimate is not None:
        peak = fullest.estimate.peak_bytes
        tiles.append((f"peak, on rank {fullest.ranks[0]}", format_bytes(peak), _fit(page, peak)))
    loudest = max(page.rank_groups, key=lambda rank_group: rank_group.sent_bytes)
    tiles.append(
        (f"messages of rank {loudest.ranks[0]}", format_bytes(loudest.sent_bytes), "in a step, the most of any")
    )
    if page.schedule is not None:
        bubble = simulate(page.schedule).bubble_rate
        tiles.append(("pipeline bubble", f"{100 * bubble:.1f} %", f"{page.schedule.name}, at equal times"))
    cells = "".join(
        f"<div><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(more)}</small></div>"
        for name, value, more in tiles
    )
    chips = "".join(chip(axis, f"{axis} {len(groups[0])}") for axis, groups in page.axes.items())
    return f'<header><h1>{escape(page.title)}</h1><p>{chips}</p><div class="tiles">{cells}</div></header>'


def _rows(page: Page) -> str:
    parts = f", in {page.microbatches} microbatches" if page.microbatches > 1 else ""
    return f"{page.rows} × {page.seq_len}{parts}"


def _fit(page: Page, peak: int) -> str:
    if page.device_bytes is None:
        return "the fullest"
    return f"{'fits' if peak <= page.device_bytes else 'does not fit'} in {format_bytes(page.device_bytes)}"


def _memory(page: Page) -> str:
    if page.fullest is None:
        return ""
    body = f'<div class="two"><div>{memory_bars(page)}</div><div>{_each(page, memory_table)}</div></div>'
    return _section("memory", "Memory of every rank, and of rank <b class='chosen'>0</b>", body + memory_in_time(page))


def _timeline(page: Page) -> str:
    if page.schedule is None:
        return ""
    picture = f'<div class="picture">{svg(simulate(page.schedule))}</div><p class="faint">{TIMES}</p>'
    return _section("timeline", "The pipeline in time, by ranks of pp", picture)


def _section(name: str, title: str, body: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{body}</section>\n'


def _each(page: Page, draw: Callable[[Page, RankGroup], str]) -> str:
    """One copy for each group of equal ranks; the script shows that of the chosen rank."""
    shown = page.group_of_rank[0]
    return "".join(
        f'<div class="alike" data-alike="{index}"{" hidden" * (index != shown)}>{draw(page, rank_group)}</div>'
        for index, rank_group in enumerate(page.rank_groups)
    )


def short_count(count: int) -> str:
    """8030261248 as 8.03 B."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return str(count)
