"""Drawing of a Pareto front (SVG): seconds of a step against the peak of a rank, every strategy that was priced a dot."""

from __future__ import annotations

from html import escape

from meshkit.preflight._flags import flags_of
from meshkit.preflight._format import format_bytes
from meshkit.preflight.search._result import Found, Tried

FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 380, 84, 26, 44, 46
GIB = 2**30
STYLE = """
.page { fill: #ffffff } .ink { fill: #24292f } .faint { fill: #57606a } .grid { stroke: #d0d7de } .other { fill: #8c959f }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } .ink { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #3d444d }
}
"""


def svg(found: Found) -> str:
    """Blue: the front, joined in the order of seconds, and the winner as a ring. Grey: what was priced besides.

    The dashed line is what the device has. A dot tells its flags to the pointer. Of a search that is not exhaustive the front
    is that of what was priced.
    """
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="Seconds of a step against peak memory" {FONT}>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(
            LEFT, 26, f"{len(found.tried):,} strategies priced, {len(found.front):,} on the front", css="ink", size=13
        ),
    ]
    if found.tried:
        parts += _plot(found)
    return "\n".join([*parts, "</svg>"])


def _plot(found: Found) -> list[str]:
    room = found.device_bytes
    seconds = [each.seconds for each in found.tried]
    sizes = [each.peak_bytes / GIB for each in found.tried] + ([] if room is None else [room / GIB])
    low_x, high_x = _widened(min(seconds), max(seconds))
    low_y, high_y = _widened(min(sizes), max(sizes))

    def at_x(value: float) -> float:
        return LEFT + (value - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    def at_y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        size, second = low_y + share * (high_y - low_y), low_x + share * (high_x - low_x)
        parts.append(f'<path class="grid" d="M{LEFT} {at_y(size):.1f}H{WIDTH - RIGHT}" stroke="#d0d7de"/>')
        parts.append(_text(LEFT - 8, at_y(size) + 4, f"{size:.3g} GiB", anchor="end"))
        parts.append(_text(at_x(second), HEIGHT - BOTTOM + 18, f"{second:.3g}", anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "seconds of a step", anchor="middle"))
    if room is not None:
        y = at_y(room / GIB)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#d55e00" stroke-dasharray="5 4"/>')
        parts.append(_text(WIDTH - RIGHT, y - 5, f"the device has {format_bytes(room)}", anchor="end"))

    def dot(each: Tried, css: str, fill: str, radius: float) -> str:
        hint = escape(f"{each.seconds:.4g} s, {format_bytes(each.peak_bytes)}: {flags_of(each.strategy)}")
        place = f'cx="{at_x(each.seconds):.1f}" cy="{at_y(each.peak_bytes / GIB):.1f}"'
        return f'<circle class="{css}" {place} r="{radius}" fill="{fill}"><title>{hint}</title></circle>'

    front = {id(each) for each in found.front}
    parts += [dot(each, "other", "#8c959f", 2.5) for each in found.tried if id(each) not in front]
    line = " ".join(f"{at_x(each.seconds):.1f},{at_y(each.peak_bytes / GIB):.1f}" for each in found.front)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#0072b2"/>')
    parts += [dot(each, "front", "#0072b2", 4) for each in found.front]
    if found.winner is not None:
        x, y = at_x(found.winner.seconds), at_y(found.winner.peak_bytes / GIB)
        parts.append(
            f'<circle class="best" cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none" stroke="#0072b2" stroke-width="2"/>'
        )
        parts.append(_text(x + 12, y - 8, "best", css="ink"))
    return parts


def _widened(low: float, high: float) -> tuple[float, float]:
    """So that no dot lies on the frame, and one value has a range."""
    room = 0.06 * (high - low) or 0.06 * high or 1.0
    return max(0.0, low - room), high + room


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", css: str = "faint") -> str:
    fill = "#24292f" if css == "ink" else "#57606a"
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">'
        f"{escape(text)}</text>"
    )
