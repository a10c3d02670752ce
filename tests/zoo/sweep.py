"""Cells of the zoo on worlds of ranks: one word for each, and the table of them all."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
import transformers

import meshkit as mk
from tests.world import RankError, pool
from tests.zoo.case import COLUMNS, Cell
from tests.zoo.judge import Outcome, Said, judge

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.jsonl")
CODE = ("meshkit", "tests/world.py", "tests/zoo/*.py")
SECONDS = 60.0
OUTCOMES: tuple[Outcome, ...] = ("equal", "refused", "wrong", "crash", "hang")
WELL_SPLIT = 0.9
OF_EDITS = ("tp=2", "tp=2, sequence", "pp=2", "cp=2", "cp=2, replicate")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What all ranks say of a cell. split: the smallest share of elements that tp, ep or etp split, of any rank. commit: with
    "+changes" where the tree had some."""

    model: str
    column: str
    outcome: Outcome
    text: str = ""
    split: float = 0.0
    seconds: float = 0.0
    traceback: str = ""
    commit: str = ""
    torch: str = ""
    transformers: str = ""

    @property
    def of(self) -> tuple[str, str, str]:
        """What was tried."""
        return self.commit, self.torch, self.transformers


def verdict(cell: Cell, ask: Callable[[Cell, str], Said] = judge) -> Row:
    """ask: what every rank is asked."""
    begin = time.monotonic()
    row = _verdict(cell, ask)
    if (
        row.outcome == "hang" and "stuck" not in row.text
    ):  # time was up, but threads ran: a machine with much else to do
        row = _verdict(cell, ask)
    commit, of_torch, of_transformers = tree()
    seconds = round(time.monotonic() - begin, 2)
    return replace(row, seconds=seconds, commit=commit, torch=of_torch, transformers=of_transformers)


@cache
def tree() -> tuple[str, str, str]:
    """As `Row.of`, of the tree that runs."""
    commit, changed = (
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", *CODE])
    )
    return commit + "+changes" * bool(changed), torch.__version__.partition("+")[0], transformers.__version__


def is_current(row: Row) -> bool:
    """Whether a row is of the code that runs here: its commit may be an earlier one, after which nothing of that changed."""
    return row.of[1:] == tree()[1:] and _same_code(row.commit)


@cache
def _same_code(commit: str) -> bool:
    asked = ["git", "diff", "--quiet", commit, "--", *CODE]
    return not commit.endswith("+changes") and subprocess.run(asked, cwd=ROOT, capture_output=True).returncode == 0


def _verdict(cell: Cell, ask: Callable[[Cell, str], Said]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        world = pool(cell.ranks)
        try:
            said = world.run(ask, cell, folder, timeout_s=SECONDS)
            failure = ""
        except RankError as error:
            failure = str(error)
            left = sorted(Path(folder).glob("*.json"))
            said = [Said(**json.loads(path.read_text())) for path in left]
    if not failure and any(each.outcome == "crash" and each.stage != "parallelize" for each in said):
        world.kill()  # its ranks may stand at different messages
    outcome, text, traceback = _joined(said, failure)
    return Row(
        model=cell.model,
        column=cell.column,
        outcome=outcome,
        text=text,
        split=min((each.split for each in said), default=0.0),
        traceback=traceback,
    )


def _joined(said: list[Said], failure: str) -> tuple[Outcome, str, str]:
    """The worst that a rank says. failure: why the world ended, if it did."""
    for outcome in ("crash", "unbuilt", "refused", "wrong"):
        of = [each for each in said if each.outcome == outcome]
        if not of:
            continue
        if outcome == "refused" and not failure and len(of) < len(said):
            return "crash", f"some ranks alone refuse: {of[0].text}", ""
        stage = "" if of[0].stage == "parallelize" or outcome == "wrong" else f"in {of[0].stage}: "
        return outcome, f"{stage}{of[0].text}", of[0].traceback
    if failure:
        died = "Traceback" in failure or "the process was ended" in failure
        return ("crash" if died else "hang"), failure.partition("\n")[0], failure
    missing = {name for each in said for name in each.wanted} - {name for each in said for name in each.names}
    texts = [each.text for each in said if each.text]  # how it generated; one rank alone says why so
    return ("wrong", f"no rank holds {min(missing)}", "") if missing else ("equal", max(texts, key=len, default=""), "")


def cells(models: Iterable[str], columns: Iterable[str] = COLUMNS, *, moes: set[str], padded: set[str]) -> list[Cell]:
    """Those that make sense: experts' axes where there are experts, padding and generation where a model takes a mask; random
    edits on the axes that read the program."""
    made = [
        Cell.of(model, column)
        for model in models
        for column in columns
        if not model.startswith("mutated.") or column in OF_EDITS
    ]
    return [
        cell
        for cell in made
        if (cell.model in moes or mk.MeshSpec.parse(cell.mesh).ep * mk.MeshSpec.parse(cell.mesh).etp == 1)
        and (not (cell.padded or cell.generate) or cell.model in padded)
    ]


def table(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """For each mesh: cells, each outcome, and how many of the equal ones have 90 % of their parameters split."""
    by_column: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_column[row.column].append(row)
    lines = []
    for column in sorted(by_column, key=lambda name: COLUMNS.index(name) if name in COLUMNS else len(COLUMNS)):
        counted = Counter(row.outcome for row in by_column[column])
        split = sum(row.outcome == "equal" and row.split >= WELL_SPLIT for row in by_column[column])
        shown = str(split) if any(axis in column for axis in ("tp=", "ep=")) else "–"
        lines.append((column, *(str(counted[outcome]) for outcome in OUTCOMES), shown))
    return lines


def read(path: Path) -> list[Row]:
    """The last row of each cell."""
    if not path.exists():
        return []
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    return list({(row.model, row.column): row for row in rows}.values())


def write(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(_line(row))


def tidy(path: Path, order: Sequence[str]) -> None:
    """One row a cell, in the order of these models, without times, which are of the machine."""
    kept = [replace(row, seconds=0.0) for row in read(path) if row.model in order]
    places = {name: place for place, name in enumerate(order)}
    kept.sort(key=lambda row: (places[row.model], row.column))
    path.write_text("".join(map(_line, kept)))


def _line(row: Row) -> str:
    """Without what is empty."""
    return json.dumps({name: value for name, value in asdict(row).items() if value}) + "\n"
