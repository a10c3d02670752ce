"""One cell: its loops in turns, the traces compared, the rows."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import os
import statistics
import traceback
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table

from benchmarks.peers import page
from benchmarks.peers.cells import PACKAGES, Cell
from benchmarks.peers.fresh import code_of
from benchmarks.peers.turns import (
    Block,
    Leave,
    Turns,
    compare,
    join_world,
    refuse_other_losses,
    resident_bytes,
    take_turns,
    world,
)
from benchmarks.rows import environment

OURS = "meshkit"
PROOF_STEPS = 13  # so many first losses must agree; after that rounding errors may have grown


def run_cell(
    name: str, cell: Cell, peers: list[str], *, rounds: int, console: Console
) -> tuple[list[dict[str, Any]], list[str]]:
    """(its rows, why other peers have none)."""
    loadavg, failed = [round(os.getloadavg()[0], 1)], []
    with ExitStack() as stack:
        worlds = {}
        for loop in (OURS, *peers):
            try:
                ranks = world(run_rank, (loop, cell), ranks=cell.work.spec.world_size)
                worlds[loop] = stack.enter_context(ranks)
            except Exception as error:
                traceback.print_exception(error)
                failed.append(f"{name}, {loop}: {str(error).strip().splitlines()[-1]}")
                if loop == OURS:
                    return [], failed
        blocks = take_turns(worlds, rounds)
        code = code_of(worlds[OURS].files())
    loadavg.append(round(os.getloadavg()[0], 1))
    rows = []
    for peer in list(blocks)[1:]:
        pair = {loop: blocks[loop] for loop in (OURS, peer)}
        try:
            trace, worst = refuse_other_losses(pair, steps=PROOF_STEPS, tolerance=cell.tolerance)
        except SystemExit as error:
            failed.append(f"{name}, {peer}: {error}")
            continue
        rows.append(
            {
                "cell": name,
                "peer": peer,
                "peer_version": importlib.metadata.version(PACKAGES[peer]),
                **environment(),
                "transformers": importlib.metadata.version("transformers"),
                "ranks": cell.work.spec.world_size,
                "work": described(cell),
                "rounds": rounds,
                "warmup": cell.warmup,
                "steps": cell.steps,
                "loadavg": loadavg,
                "trace": [float(f"{value:.7g}") for value in trace],
                "difference": float(f"{worst:.2g}"),
                **{title: dataclasses.asdict(ratio) for title, ratio in compare(blocks[OURS], blocks[peer]).items()},
                OURS: measures(blocks[OURS], cell),
                "other": measures(blocks[peer], cell),
                "code": code,
            }
        )
    console.print(table_of(name, cell, blocks, rows, loadavg))
    return rows, failed


def described(cell: Cell) -> dict[str, Any]:
    """The work, but for the sizes of its model."""
    fields = [each.name for each in dataclasses.fields(cell.work) if each.name != "config"]
    return {"kind": cell.kind} | {name: getattr(cell.work, name) for name in fields}


def measures(taken: list[Block], cell: Cell) -> dict[str, Any]:
    """A loop's own numbers, medians over its turns."""
    return {
        "wall_ms": round(statistics.median(1e3 * block.wall_s / cell.steps for block in taken), 1),
        "cpu_ms": round(statistics.median(1e3 * block.cpu_s / cell.steps for block in taken), 1),
        "peak_bytes": int(statistics.median(block.peak_bytes for block in taken)),
    }


def table_of(
    name: str, cell: Cell, blocks: dict[str, list[Block]], rows: list[dict[str, Any]], loadavg: list[float]
) -> Table:
    titles = ("ms/step", "CPU ms/step", "peak MiB", "meshkit's time", "CPU time", "memory", "trace within")
    title = f"{name}; load average {loadavg[0]} to {loadavg[1]}"
    table = Table("loop", *(Column(each, justify="right") for each in titles), title=title)
    of_peer = {row["peer"]: row for row in rows}
    for loop, taken in blocks.items():
        numbers = measures(taken, cell)
        cells = [f"{numbers['wall_ms']:.0f}", f"{numbers['cpu_ms']:.0f}", f"{numbers['peak_bytes'] / 2**20:.0f}"]
        if row := of_peer.get(loop):
            cells += [page.shown(row[ratio]) for ratio in ("wall_ratio", "cpu_ratio", "peak_memory_ratio")]
            cells.append(f"{row['difference']:.0e}")
        elif loop != OURS:
            cells += ["refused: another trace"]
        table.add_row(loop, *cells)
    return table


# ------------------------------------------------------------------------------------------------------ the ranks


def run_rank(rank: int, loop: str, cell: Cell, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    library = importlib.import_module(f"benchmarks.peers.{loop}")  # before memory is counted
    imported_bytes = resident_bytes()
    device_type = getattr(cell.work, "device_type", "cpu")
    device = join_world(rank, cell.work.spec.world_size, folder, device_type=device_type)
    turns = Turns(pipe, device, warmup=cell.warmup, steps=cell.steps, imported_bytes=imported_bytes, folder=folder)
    with suppress(Leave):
        getattr(library, cell.kind)(cell.work, turns)
    dist.destroy_process_group()
