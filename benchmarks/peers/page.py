"""Rows of the peer suite, and the page that is made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.fresh import ROOT, is_fresh

ROWS = ROOT / "benchmarks" / "results" / "peers.jsonl"
PAGE = ROOT / "docs" / "peers.md"
BEGIN, END = (
    "<!-- rows of benchmarks/results/peers.jsonl: python -m benchmarks.peers.page -->\n",
    "<!-- end of rows -->\n",
)


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def keep(rows: Sequence[dict[str, Any]]) -> None:
    """One row for each cell and peer, in the order of the table of cells; then the page."""
    from benchmarks.peers.cells import CELLS

    kept = {(row["cell"], row["peer"]): row for row in [*read(), *rows] if row["cell"] in CELLS}
    order = [(cell, peer) for cell, each in CELLS.items() for peer in each.peers]
    ROWS.write_text("".join(json.dumps(kept[key]) + "\n" for key in order if key in kept))
    write()


def write() -> None:
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + BEGIN + table(read()) + END + rest.partition(END)[2])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Of each cell all peers, the one with the least processor time first. What is older than its code is marked."""
    lines = [
        "| cell | peer | time | CPU time | peak memory | load |",
        "|---|---|---|---|---|---|",
    ]
    for cell in dict.fromkeys(row["cell"] for row in rows):
        of_cell = sorted((row for row in rows if row["cell"] == cell), key=lambda row: -row["cpu_ratio"]["median"])
        for index, row in enumerate(of_cell):
            ratios = [shown(row[name]) for name in ("wall_ratio", "cpu_ratio", "peak_memory_ratio")]
            loads = "–".join(f"{load:g}" for load in row["loadavg"])
            mark = "" if is_fresh(row) else " †"
            lines.append(f"| {'' if index else cell} | {row['peer']}{mark} | {' | '.join(ratios)} | {loads} |")
    old = sum(not is_fresh(row) for row in rows)
    lines += ["", f"† {old} rows are older than the code that they measured."] if old else []
    lost = [f"{row['cell']} to {row['peer']}" for row in rows if row["cpu_ratio"]["low"] > 1]
    lines += ["", f"meshkit needs more CPU time, quartiles above 1: {'; '.join(lost) or 'nowhere'}."]
    lost = [f"{row['cell']} to {row['peer']}" for row in rows if row["peak_memory_ratio"]["low"] > 1]
    lines += ["", f"More memory: {'; '.join(lost) or 'nowhere'}."]
    return "\n".join(["", *lines, "", ""])


def shown(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


if __name__ == "__main__":
    write()
