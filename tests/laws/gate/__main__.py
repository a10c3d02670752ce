"""Run the gate for as long as it is told, and keep what it has shown. `make docs` writes the page of it."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field, replace

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.laws.gate import support
from tests.laws.gate.cell import draw
from tests.laws.gate.choose import WORLDS
from tests.laws.gate.verdict import verdict


@dataclass(frozen=True, kw_only=True)
class Config:
    minutes: float = 10.0
    first: int | None = None
    """the first seed; by default the one after those that have passed"""
    seed: int | None = None
    """run this one alone, and print all that is said of it"""
    ask: tuple[str, ...] = field(default=())
    """what is known of these features together"""


def main(config: Config) -> int:
    console = Console()
    if config.ask:
        console.print(support.ask(config.ask, support.read()), markup=False)
        return 0
    if config.seed is not None:
        return _one(config.seed, console)
    known = support.read() if support.RESULTS.exists() else None
    if known is None or known.fingerprint != support.fingerprint():
        known = support.Results(fingerprint=support.fingerprint(), torch="", commit="", seeds=[])
    first = config.first if config.first is not None else max((last for _, last in known.seeds), default=-1) + 1
    passed, failed = list[int](), list[int]()
    try:
        _run(first, config.minutes * 60, console, passed, failed)
    finally:  # also of a run that is interrupted
        for seed in failed:
            console.print(
                f"failed: python -m tests.laws.gate --seed {seed}   # {draw(seed, WORLDS[seed % len(WORLDS)])}",
                markup=False,
            )
        console.print(f"{len(passed)} passed, {len(failed)} failed")
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        ranges = _joined([*known.seeds, *((seed, seed) for seed in passed)])
        support.write(replace(known, torch=torch.__version__.partition("+")[0], commit=commit, seeds=ranges))
    return 1 if failed else 0


def _one(seed: int, console: Console) -> int:
    cell = draw(seed, WORLDS[seed % len(WORLDS)])
    console.print(cell, markup=False)
    found = verdict(cell)
    console.print(found or "every law holds", markup=False)
    return 1 if found else 0


def _run(first: int, seconds: float, console: Console, passed: list[int], failed: list[int]) -> None:
    """Seeds from the first on, each put to those that passed or failed, until the time is up."""
    end, seed = time.monotonic() + seconds, first
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("gate", total=None)
        while (left := end - time.monotonic()) > 0:
            cell = draw(seed, WORLDS[seed % len(WORLDS)])
            found = verdict(cell)
            (failed if found else passed).append(seed)
            if found:
                console.print(f"seed {seed}: {cell}\n{found[-2000:]}\n", markup=False)
            seed += 1
            spent = seconds - left
            guess = round((seed - first) * seconds / spent) if spent > 1 else None
            progress.update(task, completed=seed - first, total=guess, description=f"gate, {len(failed)} failed")


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same seeds in as few ranges as there can be."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
