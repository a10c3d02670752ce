"""Print the table of docs/faults.md: `python -m tests.faults.table`, with MESHKIT_TEST_DEPTH=deep for other moments."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from tests.faults.test_drill import CELLS, drilled

SAYS = {
    "kill": r"^rank \d+ on \S+ has ended",
    "raise": r"^It was at",
    "stay": r"^rank \d+ on \S+ lives",
    "nan": r"^StepError",
}


def main() -> None:
    print("| block | fault | ends in | what is said |\n|---|---|---|---|")
    for block, fault in CELLS:
        with tempfile.TemporaryDirectory() as folder:
            _, status, output, took_s = drilled(block, fault, Path(folder))
        assert status != 0, output
        line = [line for line in output.splitlines() if re.search(SAYS[fault], line)][-1]
        before = next((line for line in output.splitlines() if re.search("^It was at|was told to end", line)), "")
        print(f"| {block} | {fault} | {took_s:.1f} s | {before if fault == 'kill' else ''} {line} |", flush=True)


if __name__ == "__main__":
    main()
