"""Print the table of docs/faults.md: `python -m tests.faults.table [block ...]`."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from tests.faults.test_drill import CELLS, drilled

SAYS = {
    "kill": r"^rank \d+ on \S+ has ended.*?(?=:)|^(It was at|rank \d+ was told to end, at) .*",
    "raise": r"^\w+ \(rank \d+\).*|^It was at .*",
    "stay": r"^rank \d+ on \S+ lives.*",
    "nan": r"step \d+: the gradient norm is nan; .*?\. Run again, .*?\.(?= )",
}


def main() -> None:
    print("| block | fault | ends in | what is said |\n|---|---|---|---|")
    for block, fault in CELLS:
        if sys.argv[1:] and block not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            _, status, output, took_s = drilled(block, fault, Path(folder))
        assert status != 0, output
        said = list(dict.fromkeys(found[0] for found in re.finditer(SAYS[fault], output, re.MULTILINE)))
        if not said:
            print(output, file=sys.stderr)
        print(f"| {block} | {fault} | {took_s:.1f} s | {'<br>'.join(said[-2:])} |", flush=True)


if __name__ == "__main__":
    main()
