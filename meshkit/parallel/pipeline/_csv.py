"""Pipeline schedules as CSV: meshkit's own format (read, written), and torch.distributed.pipelining's (read).

    meshkit schedule,1f1b
    microbatches,2
    placement,0,1
    ranks,2
    rank,stage,op,microbatch,backward_stage,backward_microbatch
    0,0,F,0,,
    0,0,B,0,,

Where microbatches skip stages, the line `paths,0 2 3,0 1 3` before the columns has the stages that each passes.

torch's has a line per rank and an action per cell: 0F0, 1I2, 1W2, 1B2, (0F3;3B1)OVERLAP_F_B, or nothing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import NoReturn, cast

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._table import OPS, Op, Row, Schedule

TITLE = "meshkit schedule"
COLUMNS = ["rank", "stage", "op", "microbatch", "backward_stage", "backward_microbatch"]
ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
OVERLAPPED = re.compile(r"\((\d+)F(\d+);(\d+)B(\d+)\)OVERLAP_F_B")
IMPLIED = re.compile(r"\d+(SEND|RECV|WAIT_SEND)_[FB]\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD)")

Line = tuple[int, list[str]]
"""(number in the file, its cells)"""


def write_csv(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write the schedule so that `read_csv` gives it back equal."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    # QUOTE_MINIMAL does not quote a lone carriage return, and the reader would end the line there.
    strange = not schedule.name.isprintable()
    csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL if strange else csv.QUOTE_MINIMAL).writerow(
        [TITLE, schedule.name]
    )
    writer.writerow(["microbatches", schedule.microbatches])
    writer.writerow(["placement", *schedule.placement])
    writer.writerow(["ranks", schedule.world])
    if schedule.skips:
        writer.writerow(["paths", *(" ".join(map(str, path)) for path in schedule.paths)])
    writer.writerow(COLUMNS)
    for row in schedule.rows():
        backward = (row.backward_stage, row.backward_microbatch) if row.op == "FB" else ("", "")
        writer.writerow([row.rank, row.stage, row.op, row.microbatch, *backward])
    Path(path).write_text(out.getvalue(), encoding="utf-8", newline="")


def read_csv(path: str | PathLike[str]) -> Schedule:
    """Read a schedule that `write_csv` wrote, or the actions of torch.distributed.pipelining.

    Of torch's, placement and microbatches are what its actions say, and the name is the file's. Actions that communicate or
    gather parameters are left out: they follow from the table. The table is read, not checked: `check` does that.
    Raises: PlanError with file and line.
    """
    path = Path(path)
    lines: list[Line] = []
    if not path.is_file():
        raise PlanError(
            f"there is no file {path}. Write a schedule by mk.schedules.write_csv, or give the name of one."
        )
    try:
        # utf-8-sig: spreadsheets begin a file with a byte order mark, which would make the title another word. newline="":
        # the csv module reads line ends by itself, also those inside of quotes.
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            # Lines before a fault stay in the list, so their number says where it is.
            lines.extend((reader.line_num, cells) for cells in reader)
    except (UnicodeDecodeError, csv.Error) as error:
        _refuse(path, len(lines) + 1, f"this is not CSV: {error}.", "Save it as CSV in UTF-8.")
    if lines and lines[0][1][:1] == [TITLE]:
        return _read_own(path, lines)
    return _read_torch(path, lines)


def _read_own(path: Path, lines: list[Line]) -> Schedule:
    lines = [(number, cells) for number, cells in lines if any(cells)]
    head: dict[str, tuple[int, list[str]]] = {}
    body: Iterator[Line] = iter(lines)
    for number, cells in body:
        if cells == COLUMNS:
            break
        head[cells[0]] = number, cells[1:]
    else:
        _refuse(path, lines[-1][0], f"there is no line {','.join(COLUMNS)}.", "Put it before the rows.")
    for key in ("microbatches", "placement", "ranks"):
        if key not in head:
            _refuse(path, lines[0][0], f"there is no line that starts with {key}.", "Put it before the rows.")
    number, name = head[TITLE]
    microbatches, *_ = _numbers(path, *head["microbatches"], at_least=1)
    placement = _numbers(path, *head["placement"], at_least=1)
    world, *_ = _numbers(path, *head["ranks"], at_least=1)
    number, cells = head.get("paths", (0, []))
    paths = tuple(_numbers(path, number, cell.split(), at_least=1) for cell in cells if cell)
    ranks: list[list[Row]] = [[] for _ in range(world)]
    for number, cells in body:
        if len(cells) != len(COLUMNS):
            _refuse(
                path,
                number,
                f"{len(cells)} cells, but there are {len(COLUMNS)} columns.",
                f"The columns are {','.join(COLUMNS)}.",
            )
        op = cast(Op, cells[2])
        if op not in OPS:
            _refuse(path, number, f"op {_shortened(cells[2])}.", f"The ops are {', '.join(OPS)}.")
        values = [cells[0], cells[1], cells[3], *(cells[4:] if op == "FB" else ())]
        rank, stage, microbatch, *backward = _numbers(path, number, values)
        if op != "FB" and any(cells[4:]):
            _refuse(path, number, f"{op} has a backward_stage or backward_microbatch.", "Only FB has.")
        if rank >= world:
            _refuse(path, number, f"rank {rank}, but ranks says {world}.", "Change one of them.")
        ranks[rank].append(Row(rank, stage, op, microbatch, *backward))
    return Schedule(name[0] if name else "", microbatches, placement, tuple(map(tuple, ranks)), paths)


def _read_torch(path: Path, lines: list[Line]) -> Schedule:
    lines = [(number, [cell.strip() for cell in cells]) for number, cells in lines]
    # An empty line between others is a rank without actions; at the end it is only the end of the file.
    while lines and not any(lines[-1][1]):
        lines.pop()
    owner: dict[int, tuple[int, int]] = {}  # stage: its rank, and the line that says so
    ranks = []
    for rank, (number, cells) in enumerate(lines):
        rows = []
        for cell in cells:
            # torch's tables may spell out messages and FSDP's actions; here both follow from the rows.
            if not cell or IMPLIED.fullmatch(cell):
                continue
            row = _row(path, number, rank, cell)
            for task in row.tasks:
                other, line = owner.setdefault(task.stage, (rank, number))
                if other != rank:
                    problem = f"{cell} is of stage {task.stage}, which line {line} puts on rank {other}."
                    _refuse(path, number, problem, "Keep all actions of a stage on one line.")
            rows.append(row)
        ranks.append(tuple(rows))
    if not owner:
        _refuse(path, 1, "there is no action in the file.", f"It starts with {TITLE}, or has actions such as 0F0,1B2.")
    for stage in range(max(owner)):
        if stage not in owner:
            _refuse(path, len(lines), f"there is no action of stage {stage}, but of {max(owner)}.", "Add its line.")
    microbatches = 1 + max(task.microbatch for rows in ranks for row in rows for task in row.tasks)
    placement = tuple(owner[stage][0] for stage in range(len(owner)))
    return Schedule(path.stem, microbatches, placement, tuple(ranks))


def _row(path: Path, number: int, rank: int, cell: str) -> Row:
    if match := ACTION.fullmatch(cell):
        stage, op, microbatch = match.groups()
        return Row(rank, int(stage), cast(Op, op), int(microbatch))
    if match := OVERLAPPED.fullmatch(cell):
        stage, microbatch, backward_stage, backward_microbatch = match.groups()
        return Row(rank, int(stage), "FB", int(microbatch), int(backward_stage), int(backward_microbatch))
    _refuse(path, number, f"{_shortened(cell)} is no action.", "Write stage, op and microbatch: 0F0, 1I2, 1W2 or 1B2.")


def _numbers(path: Path, number: int, cells: list[str], *, at_least: int = 0) -> tuple[int, ...]:
    """The cells as whole numbers; `at_least` so many of them."""
    for cell in cells:
        # int() alone would take "-1", " 1" and "1_0" too.
        if not re.fullmatch(r"\d+", cell):
            _refuse(path, number, f"{_shortened(cell)} is not a whole number from 0 up.", "Correct it.")
    if len(cells) < at_least:
        _refuse(path, number, "there is no number.", "Add it.")
    return tuple(map(int, cells))


def _shortened(cell: str) -> str:
    """Of a cell that is a page long its beginning."""
    return repr(cell if len(cell) <= 40 else f"{cell[:37]}...")


def _refuse(path: Path, number: int, problem: str, change: str) -> NoReturn:
    raise PlanError(f"{path}:{number}: {problem} {change}")
