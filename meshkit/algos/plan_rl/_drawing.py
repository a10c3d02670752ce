"""Drawing of a plan (SVG): a Gantt chart by node of two periods of the steady state, calls in colours."""

from __future__ import annotations

from html import escape

from meshkit.algos.plan_rl._period import seconds_of, units_of
from meshkit.algos.plan_rl._result import RLPlan

FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
WIDTH, LEFT, RIGHT, TOP, LANE, LEGEND = 900, 92, 20, 46, 22, 20
SHOWN = 2  # periods
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
SYNC = "#6e7781"
STYLE = """
.page { fill: #ffffff } .ink { fill: #24292f } .faint { fill: #57606a } .grid { stroke: #d0d7de }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } .ink { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #3d444d } }
"""


def svg(plan: RLPlan) -> str:
    """Iterations that began earlier are drawn paler at the left; what begins in the second period is the same again."""
    found = plan.found
    problem, period = found.problem, found.steady.period_s
    seconds, units = seconds_of(problem, found.choice), units_of(problem, found.choice)
    names = [name for name in found.order if seconds.get(name)]
    calls = [call.name for call in problem.calls if call.name in names]
    colours = {name: COLOURS[calls.index(name) % len(COLOURS)] if name in calls else SYNC for name in names}
    columns = 3
    height = TOP + LANE * problem.units + 34 + LEGEND * -(-len(names) // columns)
    scale = (WIDTH - LEFT - RIGHT) / (SHOWN * period)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="Plan by node" {FONT}>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(
            LEFT, 22, f"an iteration every {period:.4g} s, at most {found.gap:.1%} above the least", css="ink", size=14
        ),
    ]
    for unit in range(problem.units):
        y = TOP + LANE * unit
        first, last = unit * plan.unit_ranks, (unit + 1) * plan.unit_ranks - 1
        label = f"ranks {first}-{last}" if last > first else f"rank {first}"
        parts.append(_text(LEFT - 8, y + LANE / 2 + 4, label, anchor="end", size=11))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#d0d7de"/>')
    # In the picture the first sample that is trained on is of iteration 0, which began before with staleness.
    earliest = min(found.steady.starts[name] for name in names)
    for name in names:
        for iteration in range(-problem.staleness - 3, SHOWN + 1):
            begin = found.steady.starts[name] - earliest + iteration * period
            left, right = max(0.0, begin), min(SHOWN * period, begin + seconds[name])
            if right - left <= 1e-9 * period:
                continue
            hint = f"{name}, iteration {iteration}: {seconds[name]:.4g} s"
            for unit in sorted(units[name]):
                parts.append(
                    f'<rect x="{LEFT + left * scale:.1f}" y="{TOP + LANE * unit + 2}" '
                    f'width="{max(0.8, (right - left) * scale):.1f}" height="{LANE - 4}" fill="{colours[name]}" '
                    f'fill-opacity="{0.95 if iteration % 2 == 0 else 0.6}"><title>{escape(hint)}</title></rect>'
                )
    bottom = TOP + LANE * problem.units
    for count in range(SHOWN + 1):
        x = LEFT + count * period * scale
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom + 4}" stroke="#d0d7de" '
            'stroke-dasharray="4 3"/>'
        )
        parts.append(_text(x, bottom + 18, f"{count * period:.3g} s", anchor="middle", size=11))
    for index, name in enumerate(names):
        x = LEFT + (index % columns) * (WIDTH - LEFT - RIGHT) / columns
        y = bottom + 34 + LEGEND * (index // columns)
        parts.append(f'<rect x="{x:.1f}" y="{y - 2}" width="12" height="12" fill="{colours[name]}"/>')
        parts.append(_text(x + 18, y + 9, f"{name}  {seconds[name]:.3g} s", size=11))
    return "\n".join([*parts, "</svg>"])


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", css: str = "faint") -> str:
    fill = "#24292f" if css == "ink" else "#57606a"
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">'
        f"{escape(text)}</text>"
    )
