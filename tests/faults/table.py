"""The table of docs/faults.md: drills blocks and writes their rows.

    python -m tests.faults.table                all blocks, some ten minutes
    python -m tests.faults.table data tensor    those

A row is written as soon as it is known; the others stay.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from tests.faults.test_drill import CELLS, drilled

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
HEAD = "| block | fault | ends in | what is said |\n|---|---|---|---|\n"
TIMEOUT_S = 10  # of collectives, where a rank stays away: the page says so
ROW = re.compile(r"^\| (\w+) \| (\w+) \| .* \|\n", re.MULTILINE)
SAYS = {
    "kill": r"^rank \d+ on \S+ has ended.*?(?=:)|^(It was at|rank \d+ was told to end, at) .*",
    "raise": r"^\w+ \(rank \d+\).*|^It was at .*",
    "stay": r"^rank \d+ on \S+ lives.*",
    "nan": r"step \d+: the gradient norm is nan; .*?\. Run again, .*?\.(?= )",
}
# A place is said as `file.py:line in function`. The page says it without the line, which any change of the file moves.
PLACE = re.compile(r"(\w+\.py):\d+ in ")


def rows(page: str) -> dict[tuple[str, str], str]:
    """The row of each block and fault."""
    table = page.partition(HEAD)[2].partition("\n\n")[0] + "\n"
    return {(row[1], row[2]): row[0] for row in ROW.finditer(table)}


def drill(block: str, fault: str) -> str:
    """The row of one run."""
    with tempfile.TemporaryDirectory() as folder:
        _, status, output, took_s = drilled(block, fault, Path(folder), timeout_s=TIMEOUT_S)
    assert status != 0, output
    said = list(dict.fromkeys(match[0] for match in re.finditer(SAYS[fault], output, re.MULTILINE)))
    assert said, output
    places = PLACE.sub(r"\1 in ", "<br>".join(said[-2:]))
    return f"| {block} | {fault} | {took_s:.1f} s | {places} |\n"


def main(blocks: list[str]) -> None:
    for block, fault in CELLS:
        if blocks and block not in blocks:
            continue
        row = drill(block, fault)
        print(row, end="", flush=True)
        page = PAGE.read_text()  # and written at once: all rows take minutes
        known = {**rows(page), (block, fault): row}
        before, _, after = page.partition(HEAD)
        table = "".join(known[cell] for cell in CELLS if cell in known)
        PAGE.write_text(before + HEAD + table + "\n" + after.partition("\n\n")[2])


if __name__ == "__main__":
    main(sys.argv[1:])
