"""Is a run of GRPO with one seed the same run on every layout?

    python benchmarks/same_seed.py               # one rank, dp_replicate=2, "dp_replicate=2 tp=2" and pp=2

Each layout learns to reverse words by examples/grpo.py, in fp32, from the same weights with the same seed. Sums in another
order differ in the last bits, steps amplify that, and at some step a draw that was close falls otherwise; from there the
curves are those of two runs with equal odds. Printed and kept: up to which step every reward is the same, and how far apart
the shares of held-out prompts that are answered rightly ever are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table
from rows import environment

import meshkit as mk

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "same_seed.jsonl"
TOL_REWARD = 1e-6


@dataclass(frozen=True, kw_only=True)
class Settings:
    layouts: tuple[str, ...] = ("dp_shard=1", "dp_replicate=2", "dp_replicate=2 tp=2", "pp=2")
    """the first is what the others are compared with"""
    task: str = "reversal"
    steps: int = 100
    seed: int = 0
    eval_every: int = 10
    record: bool = False
    """Append a row to benchmarks/results/same_seed.jsonl."""


def train(settings: Settings, layout: str, out: Path) -> list[dict[str, Any]]:
    """The log of one run, a row a step."""
    ranks = mk.MeshSpec.parse(layout).world_size
    chosen = {"mesh": layout, "task": settings.task, "steps": settings.steps, "seed": settings.seed, "out": out}
    chosen |= {"eval-every": settings.eval_every, "save-every": settings.steps}
    flags = [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    subprocess.run(
        [*command, str(ROOT / "examples" / "grpo.py"), *flags],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def same_until(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> int:
    """The last step before a reward differs."""
    for row, reference in zip(rows, expected, strict=True):
        if abs(row["reward"] - reference["reward"]) > TOL_REWARD:
            return int(row["step"]) - 1
    return int(expected[-1]["step"])


def held_out(log: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(row["step"], round(row["held_out"], 3)) for row in log if "held_out" in row]


def main(settings: Settings) -> None:
    console, logs = Console(width=110), {}
    with tempfile.TemporaryDirectory() as folder:
        for index, layout in enumerate(settings.layouts):
            out = Path(folder, str(index))
            if index:
                shutil.copytree(Path(folder, "0", "sft-model"), out / "sft-model")
            with console.status(f"{layout}: {settings.steps} steps"):
                logs[layout] = train(settings, layout, out)
    table = Table("layout", "rewards equal until step", "held out, furthest apart", "held out at the end")
    compared = {}
    for layout in settings.layouts:
        pairs = zip(held_out(logs[layout]), held_out(logs[settings.layouts[0]]), strict=True)
        gap = max(abs(share - expected) for (_, share), (_, expected) in pairs)
        same = same_until(logs[layout], logs[settings.layouts[0]])
        compared[layout] = {"same_until": same, "apart": round(gap, 3), "held_out": held_out(logs[layout])}
        table.add_row(layout, str(same), f"{gap:.3f}", f"{held_out(logs[layout])[-1][1]:.3f}")
    console.print(table)
    if settings.record:
        options = {name: getattr(settings, name) for name in ("task", "steps", "seed")}
        with RESULTS.open("a") as file:
            file.write(json.dumps({**environment(), **options, "layouts": compared}) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
