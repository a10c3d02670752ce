"""What each rank holds at the fullest moment of a step, and how one comes there."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from meshkit.estimate import svg
from meshkit.estimate._drawing import COLOURS
from meshkit.estimate._result import said
from meshkit.estimate._tracker import GROUPS, HOST
from meshkit.page._mesh import bar, key, share

if TYPE_CHECKING:
    from meshkit.page._page import Alike, Page

ON_DEVICE = [group for index, group in enumerate(GROUPS) if index != HOST]


def memory_bars(page: Page) -> str:
    """A row of class "memory" for each rank; in a world too large for that, for each kind of rank."""
    estimates = [one.estimate for one in page.alike if one.estimate is not None]
    shown = [group for group in ON_DEVICE if any(one.at_peak[group] for one in estimates)]
    legend = " ".join(key(COLOURS[group], group) for group in shown)
    rows = (
        [(str(rank), rank) for rank in range(page.spec.world_size)]
        if page.is_complete
        else [(one.ranks_text, one.ranks[0]) for one in page.alike]
    )
    drawn = "".join(_row(page, name, rank) for name, rank in rows)
    limit = ""
    if page.device_bytes is not None:
        left = share(page.device_bytes, page.memory_scale)
        limit = (
            '<tr><td></td><td class="wide"><div class="bar limit">'
            f'<span style="left: {left}">{said(page.device_bytes)} of a device</span></div></td><td></td></tr>'
        )
    head = '<tr><th class="number">rank</th><th>held at the peak</th><th class="number">peak</th></tr>'
    return f'<p class="legend">{legend}</p><table class="bars">{head}{limit}{drawn}</table>'


def _row(page: Page, name: str, rank: int) -> str:
    one = page.alike[page.of_rank[rank]].estimate
    assert one is not None
    parts = (
        (COLOURS[group], share(size, page.memory_scale), f"{group}: {size:,} bytes")
        for group in ON_DEVICE
        if (size := one.at_peak[group])
    )
    line = ""
    over = ""
    if page.device_bytes is not None:
        line = f'<span class="line" style="left: {share(page.device_bytes, page.memory_scale)}"></span>'
        over = " over" * (not one.fits(page.device_bytes))
    return (
        f'<tr class="memory{over}" data-rank="{rank}" title="peak in the {escape(one.where.removeprefix("the "))}">'
        f'<th class="number">{name}</th><td class="wide"><div class="lane">{bar(parts)}{line}</div></td>'
        f'<td class="number" data-bytes="{one.peak_bytes}">{said(one.peak_bytes)}</td></tr>'
    )


def memory_table(page: Page, one: Alike) -> str:
    """The numbers of the chosen rank."""
    estimate = one.estimate
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
    return f'<td class="number" data-bytes="{size}" title="{size:,} bytes">{said(size)}</td>'


def memory_in_time(page: Page) -> str:
    """The step of the fullest rank."""
    fullest = page.fullest
    assert fullest is not None and fullest.estimate is not None
    return f'<div class="picture">{svg({f"rank {fullest.ranks[0]}": fullest.estimate})}</div>'
