"""Sections of the page: the mesh as boxes in boxes, traffic by axis, messages, parameters, memory."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from meshkit.preflight._format import format_bytes
from meshkit.preflight.estimate import COLOURS, GROUPS, HOST, svg
from meshkit.preflight.explain import PHASES, Traffic

if TYPE_CHECKING:
    from meshkit.preflight.page._page import Page, RankGroup

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
    inner = [
        (axis, direction) for axis, direction in (("cp", "down"), ("tp", "to the right")) if getattr(spec, axis) > 1
    ]
    directions = ", ".join(f"{axis} {direction}" for axis, direction in inner)
    words = " in ".join(["Ranks", *(f"boxes of {axis}" for axis in reversed(boxes))])
    layout = f"{words}; {directions}" if directions else words
    caption = f"{layout}. Point at a rank or an axis to see groups; click a rank to choose it."
    many = "" if page.is_complete else " many"
    return f'<div class="grid{many}">{_boxes(page, boxes, 0, spec.world_size)}</div><p class="faint">{caption}</p>'


def _boxes(page: Page, axes: list[str], first: int, count: int) -> str:
    """`count` ranks from `first` on, in boxes of the first of these axes."""
    if not axes:
        cells = "".join(_cell(page, rank) for rank in range(first, first + count))
        return f'<div class="cells" style="grid-template-columns: repeat({page.spec.tp}, auto)">{cells}</div>'
    axis, size = axes[0], getattr(page.spec, axes[0])
    each = count // size
    drawn = []
    for index in range(size):
        stages = ""
        if axis == "pp" and page.schedule is not None:
            stage_ids = page.schedule.stages_of(index)
            stages = f" · stage{'s' * (len(stage_ids) > 1)} {', '.join(map(str, stage_ids))}"
        inside = _boxes(page, axes[1:], first + index * each, each)
        drawn.append(
            f'<div class="box {axis}" style="--c: {colour(axis)}"><span class="label">{axis} {index}{stages}</span>'
            f"{inside}</div>"
        )
    return f'<div class="level {axis}">{"".join(drawn)}</div>'


def _cell(page: Page, rank: int) -> str:
    coordinate = page.coordinates[rank]
    rank_group = page.rank_groups[page.group_of_rank[rank]]
    inner = " ".join(f"{axis} {coordinate[axis]}" for axis in ("cp", "tp") if axis in coordinate)
    fill, tooltip = "", f"rank {rank}: {page.coordinate_text(rank)}"
    if rank_group.estimate is not None:
        tooltip += f"; peak {format_bytes(rank_group.estimate.peak_bytes)}"
        fill = f'<i class="fill" style="width: {share(rank_group.estimate.peak_bytes, page.memory_scale)}"></i>'
    inside = f"<b>{rank}</b><small>{inner}</small>{fill}"
    return f'<button class="rank" data-rank="{rank}" title="{escape(tooltip)}">{inside}</button>'


def axis_table(page: Page, rank_group: RankGroup) -> str:
    """A row per axis: the ranks of the group, and a bar of what is sent on it. Bars are to one scale for all ranks."""
    longest = max(
        (sum(row.bytes for row in rows) for any_group in page.rank_groups for rows in by_axis(any_group).values()),
        default=1,
    )
    sent = by_axis(rank_group)
    rows = []
    for axis, groups in page.axes.items():
        messages = sent.get(axis, [])
        total = sum(row.bytes for row in messages)
        text = format_bytes(total) if total else "–"
        group = next(group for group in groups if rank_group.ranks[0] in group)
        rows.append(
            f'<tr class="axis" data-axis="{axis}"><th>{chip(axis, f"{axis}={len(group)}")}</th>'
            f'<td><span class="group">{" ".join(map(str, group))}</span></td>'
            f'<td class="wide">{_phase_bar(messages, max(longest, 1))}</td>'
            f'<td class="number" data-bytes="{total}" title="{total:,} bytes">{text}</td></tr>'
        )
    if not rows:
        return "<p>One rank: nothing is sent.</p>"
    words = dict.fromkeys(PHASES) | {"step": "once per step: loss, counts, gradient norm"}
    legend = " ".join(key(PHASE_COLOURS[phase], word or phase) for phase, word in words.items())
    head = "<tr><th>axis</th><th>ranks of the group</th><th>messages of one step</th><th class='number'>bytes</th></tr>"
    return f'<table class="axes">{head}{"".join(rows)}</table><p class="legend">{legend}</p>'


def by_axis(rank_group: RankGroup) -> dict[str, list[Traffic]]:
    rows: dict[str, list[Traffic]] = {}
    for row in rank_group.explanation.traffic:
        rows.setdefault(row.axis, []).append(row)
    return rows


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


def share(size: int, total: int) -> str:
    return f"{100 * size / max(total, 1):.3f}%"


def chip(axis: str, text: str) -> str:
    return f'<span class="chip" style="--c: {colour(axis)}">{escape(text)}</span>'


def key(fill: str, text: str) -> str:
    return f'<span class="key"><i style="background: {fill}"></i>{escape(text)}</span>'


def colour(axis: str) -> str:
    return AXIS_COLOURS.get(axis, JOINED_COLOUR)


# The chosen rank: its messages, its parameters, and notes.

SIZES = (
    "Bytes of a message are those of the whole tensor: an all-gather's result, a reduce-scatter's input, and for a send or "
    "an all-to-all what leaves the rank."
)
DEFAULTS = "The messages are those of the default loss, with causal attention, and of clip_grad_norm."
EMPTY = '<td class="number faint">–</td>'


def message_table(page: Page, rank_group: RankGroup) -> str:
    phases = "".join(f'<th class="number">{phase}</th>' for phase in PHASES)
    rows = [
        f'<tr data-message="{row.axis} {row.op}"><th>{chip(row.axis, row.axis)}</th><td>{row.op}</td>'
        f'<td class="number" data-calls="{row.calls}">{row.calls:,}</td>'
        + "".join(_bytes(row.phases[phase]) for phase in PHASES)
        + f'{_bytes(row.bytes)}<td class="for">{escape(row.purpose)}</td></tr>'
        for row in rank_group.explanation.traffic
    ]
    if not rows:
        return "<p>Nothing is sent.</p>"
    head = (
        f'<tr><th>axis</th><th>collective</th><th class="number">calls</th>{phases}<th class="number">bytes</th>'
        "<th>for</th></tr>"
    )
    return f'<div class="scroll"><table class="messages">{head}{"".join(rows)}</table></div>'


def parameter_table(page: Page, rank_group: RankGroup) -> str:
    rows = []
    for group in rank_group.explanation.param_groups:
        row = group.row
        where = " ".join(chip(axis, f"{axis}: {placement}") for axis, placement in row.placements.items()) or "whole"
        shape = "×".join(map(str, row.shape))
        rows.append(
            f'<tr data-parameter="{escape(row.name)}"><th><code>{escape(row.name)}</code></th><td>{shape}</td>'
            f"<td>{str(row.dtype).removeprefix('torch.')}</td><td>{where}</td>"
            f'<td class="number" data-bytes="{row.rank_bytes}">{row.rank_bytes:,}</td>'
            f'<td class="number" data-count="{group.count}">{group.count}</td></tr>'
        )
    total = rank_group.explanation.parameter_bytes
    rows.append(
        '<tr class="total"><th>all parameters of the rank</th><td></td><td></td><td></td>'
        f'<td class="number" data-bytes="{total}">{total:,}</td><td></td></tr>'
    )
    head = (
        '<tr><th>parameter</th><th>shape</th><th>dtype</th><th>placement</th><th class="number">bytes of the rank</th>'
        '<th class="number">×</th></tr>'
    )
    return f'<div class="scroll"><table class="parameters">{head}{"".join(rows)}</table></div>'


def notes(page: Page, rank_group: RankGroup) -> str:
    lines = [*rank_group.explanation.notes, SIZES, DEFAULTS]
    if not page.is_complete:
        lines.append(
            f"In a world of {page.spec.world_size} ranks the first of each pipeline stage was looked at, and stands for the "
            "others of its stage: where sizes are uneven they hold less."
        )
    if rank_group.estimate is not None:
        kernels = "CUDA's" if rank_group.estimate.kernels == "cuda" else "a CPU's"
        lines.append(
            f"Memory counts {kernels} kernels. Not in it: workspaces of kernels, buffers of NCCL, fragmentation."
        )
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _bytes(size: int) -> str:
    if not size:
        return EMPTY
    return f'<td class="number" data-bytes="{size}" title="{size:,} bytes">{format_bytes(size)}</td>'


# Memory: what each rank holds at the peak of a step, and the step in time.

ON_DEVICE = [group for index, group in enumerate(GROUPS) if index != HOST]


def memory_bars(page: Page) -> str:
    """A row of class "memory" for each rank; in a world too large for that, for each kind of rank."""
    estimates = [rank_group.estimate for rank_group in page.rank_groups if rank_group.estimate is not None]
    shown = [group for group in ON_DEVICE if any(rank_group.at_peak[group] for rank_group in estimates)]
    legend = " ".join(key(COLOURS[group], group) for group in shown)
    rows = (
        [(str(rank), rank) for rank in range(page.spec.world_size)]
        if page.is_complete
        else [(rank_group.ranks_text, rank_group.ranks[0]) for rank_group in page.rank_groups]
    )
    drawn = "".join(_row(page, name, rank) for name, rank in rows)
    limit = ""
    if page.device_bytes is not None:
        left = share(page.device_bytes, page.memory_scale)
        limit = (
            '<tr><td></td><td class="wide"><div class="bar limit">'
            f'<span style="left: {left}">{format_bytes(page.device_bytes)} of a device</span></div></td><td></td></tr>'
        )
    head = '<tr><th class="number">rank</th><th>held at the peak</th><th class="number">peak</th></tr>'
    return f'<p class="legend">{legend}</p><table class="bars">{head}{limit}{drawn}</table>'


def _row(page: Page, name: str, rank: int) -> str:
    estimate = page.rank_groups[page.group_of_rank[rank]].estimate
    assert estimate is not None
    parts = (
        (COLOURS[group], share(size, page.memory_scale), f"{group}: {size:,} bytes")
        for group in ON_DEVICE
        if (size := estimate.at_peak[group])
    )
    line = ""
    over = ""
    if page.device_bytes is not None:
        line = f'<span class="line" style="left: {share(page.device_bytes, page.memory_scale)}"></span>'
        over = " over" * (not estimate.fits(page.device_bytes))
    return (
        f'<tr class="memory{over}" data-rank="{rank}" title="peak in the {escape(estimate.where.removeprefix("the "))}">'
        f'<th class="number">{name}</th><td class="wide"><div class="lane">{bar(parts)}{line}</div></td>'
        f'<td class="number" data-bytes="{estimate.peak_bytes}">{format_bytes(estimate.peak_bytes)}</td></tr>'
    )


def memory_table(page: Page, rank_group: RankGroup) -> str:
    """The numbers of the chosen rank."""
    estimate = rank_group.estimate
    assert estimate is not None
    rows = [
        (key(COLOURS[group], group), estimate.at_peak[group], estimate.most[group])
        for group in ON_DEVICE
        if estimate.most[group]
    ]
    if estimate.host_bytes:
        rows.append((key("transparent", "on the host"), estimate.at_peak["on the host"], estimate.host_bytes))
    drawn = "".join(f"<tr><th>{name}</th>{_number(at_peak)}{_number(most)}</tr>" for name, at_peak, most in rows)
    total = f'<tr class="total"><th>all on the device</th>{_number(estimate.peak_bytes)}<td></td></tr>'
    head = '<tr><th></th><th class="number">at the peak</th><th class="number">at most</th></tr>'
    where = f"Peak in the {estimate.where.removeprefix('the ')}."
    return f'<table class="held">{head}{drawn}{total}</table><p class="faint">{escape(where)}</p>'


def _number(size: int) -> str:
    return f'<td class="number" data-bytes="{size}" title="{size:,} bytes">{format_bytes(size)}</td>'


def memory_in_time(page: Page) -> str:
    """The step of the fullest rank."""
    fullest = page.fullest
    assert fullest is not None and fullest.estimate is not None
    return f'<div class="picture">{svg({f"rank {fullest.ranks[0]}": fullest.estimate})}</div>'
