"""A page of the ranks (status page, dashboard): where each is, for how long, and whether it works or waits for others."""

from __future__ import annotations

import html
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshkit.errors import PlanError
from meshkit.faults.heartbeat import Entry
from meshkit.faults.links import Link
from meshkit.mesh.ranges import ranges_in_words

EVERY_S = 5.0
SHOWN = 512  # ranks, the worst first
_COLOURS = {
    "failed": "#f7c5c0",
    "silent": "#f7c5c0",
    "works": "#fbeec2",
    "waits": "#ffffff",
    "done": "#d5efd5",
}
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:1.5em}table{border-collapse:collapse}"
    "td,th{padding:.25em .8em;text-align:left;border-bottom:1px solid #ddd}td.n,th.n{text-align:right}"
)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """state: failed, silent, works, waits, done. share: of the looks at which it did not wait for others."""

    rank: int
    entry: Entry | None
    state: str
    share: float


class Page:
    """An HTML file that one rank writes every few seconds, from the heartbeats of all.

    A rank that works while the others wait is the one for which they wait; one that works at most looks while the others
    mostly wait is slow. Raises: PlanError for a folder that cannot be written.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.file = Path(file)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text("<p>No heartbeat has come yet.</p>")
        except OSError as error:
            raise PlanError(
                f"page={str(file)!r} cannot be written: {error.strerror}. Give a file in a folder of yours."
            ) from error
        self._written_at = float("-inf")
        self._beats: dict[int, tuple[int, float]] = {}  # of each rank: its last beat, and when it was seen first
        self._looks, self._worked = 0, Counter[int]()
        self._links: Sequence[Link] = ()

    def show_links(self, links: Sequence[Link]) -> None:
        """From now on."""
        self._links = links

    def is_due(self) -> bool:
        return time.monotonic() - self._written_at >= EVERY_S

    def write(self, entries: Mapping[int, Entry | None], *, patience_s: float) -> None:
        """entries: of all ranks. patience_s: a rank whose heartbeat has not changed for so long is silent."""
        self._written_at = time.monotonic()
        ranks = self._judged(entries, patience_s)
        beside = self.file.with_name(f".{self.file.name}.partial")  # so that no reader sees half a page
        beside.write_text(_page(ranks) + _table_of_links(self._links))
        beside.replace(self.file)

    def _judged(self, entries: Mapping[int, Entry | None], patience_s: float) -> list[Rank]:
        self._looks += 1
        now, found = time.monotonic(), []
        for rank, entry in entries.items():
            beat = -1 if entry is None else entry.beat
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
            state = _state(entry, silent=now - self._beats[rank][1] > patience_s)
            self._worked[rank] += state == "works"
            found.append(Rank(rank=rank, entry=entry, state=state, share=self._worked[rank] / self._looks))
        return found


def _state(entry: Entry | None, *, silent: bool) -> str:
    if entry is not None and entry.left == "done":
        return "done"
    if entry is not None and entry.left:
        return "failed"
    if silent or entry is None:
        return "silent"
    return "waits" if entry.waits else "works"


def _page(ranks: Sequence[Rank]) -> str:
    counts = Counter(each.state for each in ranks)
    order = list(_COLOURS)
    worst = sorted(ranks, key=lambda each: (order.index(each.state), -each.share, each.rank))[:SHOWN]
    title = ", ".join(f"{counts[state]} {state}" for state in order if counts[state])
    left_out = f"<p>and {len(ranks) - SHOWN} more ranks.</p>" if len(ranks) > SHOWN else ""
    rows = "\n".join(map(_row, worst))
    return (
        f'<!doctype html>\n<meta charset="utf-8">\n<meta http-equiv="refresh" content="{EVERY_S:.0f}">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n<h1>{len(ranks)} ranks: {title}</h1>\n"
        f"<p>Written {time.strftime('%Y-%m-%d %H:%M:%S')}. A rank that works while others wait keeps them waiting.</p>\n"
        '<table>\n<tr><th class="n">rank</th><th>host</th><th>state</th><th class="n">for</th>'
        f'<th class="n">worked</th><th>where</th></tr>\n{rows}\n</table>\n{left_out}\n'
    )


def _row(each: Rank) -> str:
    entry = each.entry
    said = (
        ("", "", "")
        if entry is None
        else (entry.host, f"{entry.now - entry.since:.0f} s", entry.error or entry.location)
    )
    host, since, where = map(html.escape, said)
    return (
        f'<tr style="background:{_COLOURS[each.state]}"><td class="n">{each.rank}</td><td>{host}</td><td>{each.state}</td>'
        f'<td class="n">{since}</td><td class="n">{each.share:.0%}</td><td>{where}</td></tr>'
    )


def _table_of_links(links: Sequence[Link]) -> str:
    """The matrix by axis; a bar has the length of the time on the wire."""
    if not links:
        return ""
    longest_s = max(link.wire_s for link in links) or 1.0
    worst = sorted(links, key=lambda link: (not link.is_slow, link.axis, -link.wire_s))[:SHOWN]
    rows = "\n".join(_row_of_link(link, link.wire_s / longest_s) for link in worst)
    return (
        "<h2>Links, by axis</h2>\n<p>Of a step: on the wire, how long the last rank waits; late, how long the others wait "
        'for it.</p>\n<table>\n<tr><th>axis</th><th>ranks</th><th class="n">calls</th><th class="n">MB/s</th>'
        f'<th class="n">on the wire</th><th class="n">late</th><th></th></tr>\n{rows}\n</table>\n'
    )


def _row_of_link(link: Link, share: float) -> str:
    colour = _COLOURS["failed"] if link.is_slow else _COLOURS["waits"]
    cells = (
        f"{link.calls}",
        f"{link.bytes_per_s / 1e6:.3g}",
        f"{link.wire_s * 1e3:.3g} ms",
        f"{link.late_s * 1e3:.3g} ms",
    )
    numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
    bar = f'<td><div style="background:#789;height:.8em;width:{10 * share:.2f}em"></div></td>'
    ranks = ranges_in_words(link.ranks)
    return f'<tr style="background:{colour}"><td>{html.escape(link.axis)}</td><td>{ranks}</td>{numbers}{bar}</tr>'
