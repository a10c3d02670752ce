"""Is meshkit as fast and as small as its peers, cell by cell, doing the same work in the same run?

    make peers                                                          # builds their environment, runs all, keeps rows
    python -m benchmarks.peers --cells "1 rank" FSDP                    # in an environment that has the peers
    python -m benchmarks.peers --stale --record                         # cells without a row, or whose code has changed
    python -m benchmarks.peers --cells FSDP --preset 1b --mesh dp_shard=8   # GPUs: bf16, blocks compiled

Every loop of a cell has ranks of its own, which are stopped by SIGSTOP while another one runs a block of steps. All must
give the same trace (losses, ids of answers, sums of what was read), or there is no row. Ratios are of meshkit to the other,
within a round, where the load of the machine is nearly the same for both: below 1 is in favour of meshkit.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch
import tyro
from rich.console import Console

from benchmarks.peers import page
from benchmarks.peers.cells import CELLS, PACKAGES, Cell
from benchmarks.peers.fresh import is_fresh
from benchmarks.peers.run import run_cell
from benchmarks.peers.work import PRESETS, TOL_LOSS_BF16, Training


@dataclass(frozen=True, kw_only=True)
class Settings:
    cells: tuple[str, ...] = tuple(CELLS)
    """Names of the table in cells.py."""
    peers: tuple[str, ...] = tuple(PACKAGES)
    """With whom, of those that a cell has."""
    rounds: int = 5
    preset: Literal["tiny", "1b", "8b-cut"] = "tiny"
    """Sizes of cells of training; on CUDA bf16 and compiled blocks."""
    mesh: str | None = None
    """Another mesh for these cells."""
    layers: int | None = None
    stale: bool = False
    """Of the cells those alone that have no row for a peer, or one of other code."""
    record: bool = False
    """Rows into benchmarks/results/peers.jsonl, in place of older ones of the same cell and peer; then docs/peers.md."""


def main(settings: Settings) -> int:
    console = Console(soft_wrap=True, width=110)
    if unknown := [name for name in settings.cells if name not in CELLS]:
        raise SystemExit(f"--cells {unknown}: choose of {', '.join(CELLS)}.")
    if settings.record and (settings.preset != "tiny" or settings.mesh or settings.layers):
        raise SystemExit("--record: rows are of the table's own work; leave --preset, --mesh and --layers away.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks that are stopped are ended too
    multiprocessing.set_forkserver_preload(["benchmarks.peers.work"])  # imported once, shared by all ranks
    failed = []
    for name in settings.cells:
        cell = resolved(CELLS[name], settings)
        peers = [peer for peer in cell.peers if peer in settings.peers]
        if settings.stale:
            fresh = {row["peer"] for row in page.read() if row["cell"] == name and is_fresh(row)}
            peers = [peer for peer in peers if peer not in fresh]
        if not peers:
            continue
        rows, broken = run_cell(name, cell, peers, rounds=settings.rounds, console=console)
        failed += broken
        if settings.record:
            page.keep(rows)
    for text in failed:
        print(f"no row: {text}")
    return bool(failed)


def resolved(cell: Cell, settings: Settings) -> Cell:
    """The cell on this machine."""
    cuda = torch.cuda.is_available()
    if not isinstance(cell.work, Training):
        return cell
    changes: dict[str, Any] = {} if settings.mesh is None else {"mesh": settings.mesh}
    if cuda:
        changes |= {"bf16": True, "compile": True, "device_type": "cuda"}
    if settings.preset != "tiny" or settings.layers:
        preset = PRESETS[settings.preset]
        layers = settings.layers or preset.config.num_hidden_layers
        config = dataclasses.replace(preset.config, num_hidden_layers=layers)
        changes |= {"config": config, "rows": preset.rows, "tokens": preset.tokens}
    work = dataclasses.replace(cell.work, **changes)
    return dataclasses.replace(cell, work=work, tolerance=TOL_LOSS_BF16 if cuda else cell.tolerance)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
