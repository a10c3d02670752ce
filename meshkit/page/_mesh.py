"""The ranks of the mesh as boxes in boxes, and what one rank sends on each of its axes."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from meshkit.estimate._result import said
from meshkit.explain import PHASES, Traffic

if TYPE_CHECKING:
    from meshkit.page._page import Alike, Page

AXIS_COLOURS = {
    "pp": "#8250df",
    "dp_replicate": "#bf8700",
    "dp_shard": "#0969da",
    "cp": "#1a9850",
    "tp": "#e5484d",
    "edp": "#0e9aa7",
    "ep": "#d6409f",
    "etp": "#a0662d",
}
JOINED_COLOUR = "#7d8590"  # of several axes as one
PHASE_COLOURS = {"forward": "#56b4e9", "recompute": "#e69f00", "backward": "#d55e00", "step": "#8c959f"}
BOXES = ("pp", "dp_replicate", "dp_shard")  # from the outside; inside of them cp goes down and tp to the right


def mesh_grid(page: Page) -> str:
    """One button of class "rank" per rank, in rank order."""
    spec = page.spec
    boxes = [axis for axis in BOXES if getattr(spec, axis) > 1]
    inner = [(axis, way) for axis, way in (("cp", "down"), ("tp", "to the right")) if getattr(spec, axis) > 1]
    ways = ", ".join(f"{axis} {way}" for axis, way in inner)
    words = " in ".join(["Ranks", *(f"boxes of {axis}" for axis in reversed(boxes))])
    told = f"{words}{f'; {ways}' if ways else ''}. Point at a rank or an axis to see groups; click a rank to choose it."
    many = "" if page.is_complete else " many"
    return f'<div class="grid{many}">{_boxes(page, boxes, 0, spec.world_size)}</div><p class="faint">{told}</p>'


def _boxes(page: Page, axes: list[str], first: int, count: int) -> str:
    """The ranks from `first` on, of which these axes are left to be told apart."""
    if not axes:
        cells = "".join(_cell(page, rank) for rank in range(first, first + count))
        return f'<div class="cells" style="grid-template-columns: repeat({page.spec.tp}, auto)">{cells}</div>'
    axis, size = axes[0], getattr(page.spec, axes[0])
    each = count // size
    drawn = []
    for place in range(size):
        stages = ""
        if axis == "pp" and page.schedule is not None:
            own = page.schedule.stages_of(place)
            stages = f" · stage{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
        inside = _boxes(page, axes[1:], first + place * each, each)
        drawn.append(
            f'<div class="box {axis}" style="--c: {colour(axis)}"><span class="label">{axis} {place}{stages}</span>'
            f"{inside}</div>"
        )
    return f'<div class="level {axis}">{"".join(drawn)}</div>'


def _cell(page: Page, rank: int) -> str:
    place = page.places[rank]
    one = page.alike[page.of_rank[rank]]
    inner = " ".join(f"{axis} {place[axis]}" for axis in ("cp", "tp") if axis in place)
    fill, told = "", f"rank {rank}: {page.place_text(rank)}"
    if one.estimate is not None:
        told += f"; peak {said(one.estimate.peak_bytes)}"
        fill = f'<i class="fill" style="width: {share(one.estimate.peak_bytes, page.memory_scale)}"></i>'
    inside = f"<b>{rank}</b><small>{inner}</small>{fill}"
    return f'<button class="rank" data-rank="{rank}" title="{escape(told)}">{inside}</button>'


def axis_table(page: Page, one: Alike) -> str:
    """A row per axis: the ranks of the group, and a bar of what is sent on it. Bars are to one scale for all ranks."""
    longest = max(
        (sum(row.bytes for row in rows) for other in page.alike for rows in by_axis(other).values()), default=1
    )
    sent = by_axis(one)
    rows = []
    for axis, groups in page.axes.items():
        own = sent.get(axis, [])
        total = sum(row.bytes for row in own)
        group = next(group for group in groups if one.ranks[0] in group)
        rows.append(
            f'<tr class="axis" data-axis="{axis}"><th>{chip(axis, f"{axis}={len(group)}")}</th>'
            f'<td><span class="group">{" ".join(map(str, group))}</span></td>'
            f'<td class="wide">{_phase_bar(own, max(longest, 1))}</td>'
            f'<td class="number" data-bytes="{total}" title="{total:,} bytes">{said(total) if total else "–"}</td></tr>'
        )
    if not rows:
        return "<p>One rank: nothing is sent.</p>"
    words = dict.fromkeys(PHASES) | {"step": "once per step: loss, counts, gradient norm"}
    legend = " ".join(key(PHASE_COLOURS[phase], word or phase) for phase, word in words.items())
    head = "<tr><th>axis</th><th>ranks of the group</th><th>messages of one step</th><th class='number'>bytes</th></tr>"
    return f'<table class="axes">{head}{"".join(rows)}</table><p class="legend">{legend}</p>'


def by_axis(one: Alike) -> dict[str, list[Traffic]]:
    found: dict[str, list[Traffic]] = {}
    for row in one.explanation.traffic:
        found.setdefault(row.axis, []).append(row)
    return found


def _phase_bar(rows: Iterable[Traffic], longest: int) -> str:
    rows = list(rows)
    sizes = {phase: sum(row.phases[phase] for row in rows) for phase in PHASES}
    return bar(
        (PHASE_COLOURS[phase], share(size, longest), f"{phase}: {size:,} bytes")
        for phase, size in sizes.items()
        if size
    )


def bar(parts: Iterable[tuple[str, str, str]]) -> str:
    """parts: (colour, width, title)"""
    drawn = "".join(
        f'<i style="width: {width}; background: {fill}" title="{escape(title)}"></i>' for fill, width, title in parts
    )
    return f'<div class="bar">{drawn}</div>'


def share(size: int, whole: int) -> str:
    return f"{100 * size / max(whole, 1):.3f}%"


def chip(axis: str, text: str) -> str:
    return f'<span class="chip" style="--c: {colour(axis)}">{escape(text)}</span>'


def key(fill: str, text: str) -> str:
    return f'<span class="key"><i style="background: {fill}"></i>{escape(text)}</span>'


def colour(axis: str) -> str:
    return AXIS_COLOURS.get(axis, JOINED_COLOUR)
