"""The day a GPU is there: the gate's cells on NCCL with every law, then the benchmarks; rows and docs/gpu.md of them.

make gpu                                  on 1, 2, 4 or 8 devices, whichever there are
python -m tests.gpu --cells 20            the first cells alone
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import tyro

from benchmarks.rows import environment
from tests.device import world
from tests.device.cells import judged
from tests.gpu.rows import PAGE, ROOT, ROWS, STEPS, Row, page, read, write
from tests.laws.gate.cell import Cell, draw
from tests.laws.gate.choose import covering
from tests.world import RankError

BENCHMARKS = (
    "benchmarks/gpu_step.py --record",
    "benchmarks/quantize.py --record",
    "-m benchmarks.peers --cells FSDP --peers plain --preset 1b --mesh dp_shard={ranks}",
    "benchmarks/loss.py",
    "benchmarks/experts.py",
    "benchmarks/offload.py",
    "benchmarks/optimizer.py",
    "benchmarks/generation.py",
)
CELL_S, BENCHMARK_S = 300.0, 1800.0


@dataclass(frozen=True, kw_only=True)
class Config:
    device: str = "cuda"
    """or late, the device of tests, on which this script is rehearsed"""
    cells: int | None = None
    """so many of the gate's that fit; by default all"""
    ranks: int | None = None
    """by default the most devices there are, of 1, 2, 4 and 8"""
    benchmarks: tuple[str, ...] = BENCHMARKS
    rows: Path = ROWS
    page: Path = PAGE


def main(config: Config) -> int:
    ranks = config.ranks or most(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)
    if not ranks:
        print(
            "make gpu: there is no device. python -m tests.gpu --device late --ranks 2 --cells 3 shows what it would do."
        )
        return 1
    about = {**environment(), "device": environment()["gpu"] or config.device, "ranks": ranks}
    rows: list[Row] = []
    try:
        for row in chain(_cells(config, ranks), _benchmarks(config, ranks)):
            rows.append({**about, **row})
            write(rows, config.rows)  # at once: an interrupted run keeps what it has
            config.page.write_text(page(rows, read(STEPS)))
            print(row["kind"], row["name"], row.get("broken") or row.get("status") or "holds", flush=True)
    finally:
        world.end()
    return 1 if any(row.get("broken") or row.get("status") for row in rows) else 0


def most(devices: int) -> int:
    """Of 1, 2, 4 and 8 the most that there are; 0 where there is none."""
    return max((ranks for ranks in (1, 2, 4, 8) if ranks <= devices), default=0)


def fitting(ranks: int) -> list[Cell]:
    """The gate's cells for at most so many ranks, those of many ranks first, and none that is refused."""
    drawn = [draw(*seed) for seed in covering(320, among=3000)]
    fit = [cell for cell in drawn if cell.spec.world_size <= ranks and not cell.refusals()]
    return sorted(fit, key=lambda cell: -cell.spec.world_size)


def _cells(config: Config, ranks: int) -> Iterator[Row]:
    for cell in fitting(ranks)[: config.cells]:
        began, broken = time.perf_counter(), ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = world.run(
                    cell.spec.world_size, judged, cell, f"{folder}/c", device=config.device, timeout_s=CELL_S
                )
                broken = "\n".join(
                    f"rank {rank}: {what}"
                    for rank, (laws, races) in enumerate(said)
                    for what in [*laws.values(), *races]
                )
            except RankError as error:
                broken = str(error).strip().splitlines()[-1]
        yield {"kind": "cell", "name": str(cell), "broken": broken, "s": round(time.perf_counter() - began, 1)}


def _benchmarks(config: Config, ranks: int) -> Iterator[Row]:
    for benchmark in config.benchmarks:
        command = benchmark.format(ranks=ranks)
        began = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, *shlex.split(command)], cwd=ROOT, capture_output=True, text=True, timeout=BENCHMARK_S
            )
            status, output = done.returncode, done.stdout if done.returncode == 0 else done.stderr
        except subprocess.TimeoutExpired:
            status, output = 124, f"not over after {BENCHMARK_S:.0f} s"
        last = "\n".join(output.strip().splitlines()[-8:])
        yield {
            "kind": "benchmark",
            "name": command,
            "status": status,
            "output": last,
            "s": round(time.perf_counter() - began, 1),
        }


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config)))
