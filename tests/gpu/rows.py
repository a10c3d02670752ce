"""Rows of what ran on GPUs, and the page that is made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "results" / "gpu.jsonl"
STEPS = ROOT / "benchmarks" / "results" / "gpu_step.jsonl"
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


def page(rows: Sequence[Row], steps: Sequence[Row] = ()) -> str:
    """The page of these rows: of one run, since a run replaces the rows of the one before. steps: of gpu_step.py."""
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
    return "\n".join([*lines, *_steps(steps)]) + "\n"


def _steps(rows: Sequence[Row]) -> list[str]:
    """Of each case the seconds and bytes that were measured, and by how much what was predicted is off."""
    if not rows:
        return []
    first = rows[0]
    lines = [
        "",
        "## A step, and what was said of it before",
        "",
        f"`python benchmarks/gpu_step.py --record`: layers of an 8B-shaped model on one {first['gpu']}, bf16, blocks "
        f"compiled (torch {first['torch']}, commit `{first['commit'][:12]}`). plain: transformers' decoder with "
        "`fully_shard` by hand. MFU counts attention's whole square, of the datasheet's peak. Forecast and estimate: by how "
        "much `mk.forecast` on that GPU's datasheet and `mk.estimate` are off, which know the model and the strategy alone; "
        "`--again` makes them anew. Behind what the allocator reserved is the estimate's error of that. "
        "The datasheet's shares of its peaks were chosen on these rows: the forecasts' errors are "
        "of a fit.",
        "",
        "| loop | variant | rows × tokens | layers | s a step | forecast | tokens/s | MFU | GiB | estimate | reserved |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            continue
        said, step_s, size = row.get("predicted"), row["step_s"]["median"], row["peak_allocated_bytes"]
        off = [f"{said['step_s'] / step_s - 1:+.1%}", f"{said['peak_bytes'] / size - 1:+.1%}"] if said else ["", ""]
        if said and said["unpriced"]:
            off[0] += f" (without {', '.join(said['unpriced'])})"
        told = [
            row["loop"],
            row["variant"],
            f"{row['rows']} × {row['tokens']:,}",
            str(row["layers"]),
            f"{step_s:.4f}",
            off[0],
        ]
        told += [f"{row['tokens_per_s']:,.0f}", f"{row['mfu_full']:.1%}", f"{size / 2**30:.2f}", off[1]]
        reserved = row["peak_reserved_bytes"]
        told.append(f"{reserved / 2**30:.2f}" + (f" ({said['reserved_bytes'] / reserved - 1:+.1%})" if said else ""))
        lines.append("| " + " | ".join(told) + " |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
