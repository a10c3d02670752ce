"""Run the zoo: every model on every mesh against one device. `make zoo` runs all of it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.zoo import all as zoo
from tests.zoo.case import COLUMNS, Cell
from tests.zoo.page import page
from tests.zoo.sweep import (
    OUTCOMES,
    RESULTS,
    ROOT,
    WELL_SPLIT,
    Row,
    cells,
    is_current,
    read,
    table,
    tidy,
    verdict,
    write,
)

PAGE = ROOT / "docs/zoo.md"


@dataclass(frozen=True, kw_only=True)
class Config:
    models: str = "."
    """a regular expression of names"""
    meshes: str = ""
    """columns, separated by semicolons, as "tp=2; tp=2, sequence"; by default all"""
    out: Path = RESULTS
    """a line for each cell is added here"""
    resume: bool = False
    """leave out cells that the file has of this code, torch and transformers, but for those that hung"""
    show: bool = False
    """only print the table of the file, and what is wrong in it"""
    write_docs: bool = False
    """put the file in order, write docs/zoo.md from it, and run nothing"""


def main(config: Config) -> int:
    console = Console()
    columns = [part.strip() for part in config.meshes.split(";") if part.strip()] or list(COLUMNS)
    chosen = [name for name in zoo.names() if re.search(config.models, name)]
    wanted = cells(chosen, columns, moes=zoo.moes(), padded=zoo.padded())
    wanted.sort(key=lambda cell: cell.ranks)  # stable: a model's cells stay together, and its oracle is kept
    if config.resume:
        known = {(row.model, row.column) for row in read(config.out) if row.outcome != "hang" and is_current(row)}
        wanted = [cell for cell in wanted if (cell.model, cell.column) not in known]
    if config.write_docs:
        tidy(config.out, zoo.names())
        PAGE.write_text(page(read(config.out)))
        return 0
    if not config.show:
        _run(wanted, config.out, console)
    rows = [row for row in read(config.out) if row.model in chosen and row.column in columns]
    _print(rows, console)
    return int(any(row.outcome not in ("equal", "refused") for row in rows))


def _run(wanted: list[Cell], out: Path, console: Console) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*bars, console=console) as progress:
        task = progress.add_task("zoo", total=len(wanted))
        for cell in wanted:
            progress.update(task, description=f"{cell.model} {cell.column}")
            write(out, row := verdict(cell))
            progress.advance(task)
            if row.outcome not in ("equal", "refused"):
                _say(row, console)


def _print(rows: list[Row], console: Console) -> None:
    for row in rows:
        if row.outcome not in ("equal", "refused"):
            _say(row, console)
    shown = Table("mesh", *OUTCOMES, f"of the equal: {WELL_SPLIT:.0%} split")
    for line in table(rows):
        shown.add_row(*line)
    console.print(shown)


def _say(row: Row, console: Console) -> None:
    console.print(f"{row.outcome}: {row.model} on {row.column}: {row.text}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
