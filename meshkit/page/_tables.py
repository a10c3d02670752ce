"""Of the chosen rank: its messages, its parameters, and what is to be known besides."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from meshkit.estimate._result import said
from meshkit.explain import PHASES
from meshkit.page._mesh import chip

if TYPE_CHECKING:
    from meshkit.page._page import Alike, Page

SIZES = (
    "Bytes of a message are those of the whole tensor: an all-gather's result, a reduce-scatter's input, and for a send or "
    "an all-to-all what leaves the rank."
)
DEFAULTS = "The messages are those of the default loss, with causal attention, and of clip_grad_norm."
EMPTY = '<td class="number faint">–</td>'


def message_table(page: Page, one: Alike) -> str:
    phases = "".join(f'<th class="number">{phase}</th>' for phase in PHASES)
    rows = [
        f'<tr data-message="{row.axis} {row.op}"><th>{chip(row.axis, row.axis)}</th><td>{row.op}</td>'
        f'<td class="number" data-calls="{row.calls}">{row.calls:,}</td>'
        + "".join(_bytes(row.phases[phase]) for phase in PHASES)
        + f'{_bytes(row.bytes)}<td class="for">{escape(row.purpose)}</td></tr>'
        for row in one.explanation.traffic
    ]
    if not rows:
        return "<p>Nothing is sent.</p>"
    head = (
        f'<tr><th>axis</th><th>collective</th><th class="number">calls</th>{phases}<th class="number">bytes</th>'
        "<th>for</th></tr>"
    )
    return f'<div class="scroll"><table class="messages">{head}{"".join(rows)}</table></div>'


def parameter_table(page: Page, one: Alike) -> str:
    rows = []
    for group in one.explanation.param_groups:
        row = group.row
        where = " ".join(chip(axis, f"{axis}: {placement}") for axis, placement in row.placements.items()) or "whole"
        shape = "×".join(map(str, row.shape))
        rows.append(
            f'<tr data-parameter="{escape(row.name)}"><th><code>{escape(row.name)}</code></th><td>{shape}</td>'
            f"<td>{str(row.dtype).removeprefix('torch.')}</td><td>{where}</td>"
            f'<td class="number" data-bytes="{row.rank_bytes}">{row.rank_bytes:,}</td>'
            f'<td class="number" data-count="{group.count}">{group.count}</td></tr>'
        )
    total = one.explanation.parameter_bytes
    rows.append(
        '<tr class="total"><th>all parameters of the rank</th><td></td><td></td><td></td>'
        f'<td class="number" data-bytes="{total}">{total:,}</td><td></td></tr>'
    )
    head = (
        '<tr><th>parameter</th><th>shape</th><th>dtype</th><th>placement</th><th class="number">bytes of the rank</th>'
        '<th class="number">×</th></tr>'
    )
    return f'<div class="scroll"><table class="parameters">{head}{"".join(rows)}</table></div>'


def notes(page: Page, one: Alike) -> str:
    lines = [*one.explanation.notes, SIZES, DEFAULTS]
    if not page.is_complete:
        lines.append(
            f"In a world of {page.spec.world_size} ranks the first of each pipeline stage was looked at, and stands for the "
            "others of its stage: where sizes are uneven they hold less."
        )
    if one.estimate is not None:
        kernels = "CUDA's" if one.estimate.kernels == "cuda" else "a CPU's"
        lines.append(
            f"Memory counts {kernels} kernels. Not in it: workspaces of kernels, buffers of NCCL, fragmentation."
        )
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _bytes(size: int) -> str:
    if not size:
        return EMPTY
    return f'<td class="number" data-bytes="{size}" title="{size:,} bytes">{said(size)}</td>'
