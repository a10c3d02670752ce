"""Rows of what ran on GPUs, and the page that is made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "results" / "gpu.jsonl"
PAGE = ROOT / "docs" / "gpu.md"
Row = dict[str, Any]

HEAD = """# What has run on GPUs

`make gpu` runs, on 1, 2, 4 or 8 devices, whichever there are, the cells of the gate on NCCL with every law, then the
benchmarks, keeps rows in `benchmarks/results/gpu.jsonl`, and writes this page from them. What is on no row has been tried on
CPUs alone: on gloo, and on a device for tests whose work is late (`tests/device/`), with streams, events, pinned memory and
groups as a GPU has them.
"""
NOTHING = "\nNot yet measured: there are no rows.\n"


def read(file: Path = ROWS) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write(rows: Sequence[Row], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def page(rows: Sequence[Row]) -> str:
    """The page of these rows: of one run, since a run replaces the rows of the one before."""
    if not rows:
        return HEAD + NOTHING
    first = rows[0]
    cells = [row for row in rows if row["kind"] == "cell"]
    broken = [row for row in cells if row["broken"]]
    benchmarks = [row for row in rows if row["kind"] == "benchmark"]
    lines = [
        HEAD,
        f"{first['date']}, commit `{first['commit'][:12]}`, torch {first['torch']}, {first['ranks']} × {first['device']}: "
        f"**{len(cells) - len(broken)} of {len(cells)} cells** kept every law.",
    ]
    if broken:
        lines += ["", "| cell | what did not hold |", "|---|---|"]
        lines += [f"| `{row['name']}` | {_cell(row['broken'])} |" for row in broken]
    if benchmarks:
        lines += ["", "| benchmark | status | its last lines |", "|---|---|---|"]
        lines += [f"| `{row['name']}` | {row['status']} | {_cell(row['output'])} |" for row in benchmarks]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
