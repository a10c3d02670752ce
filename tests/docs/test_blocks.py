"""Documentation cannot rot: every block of code runs, and prints what the page says it prints.

A block that begins with `# torchrun --nproc-per-node N name.py` is a file of its own, run on N ranks; one that begins with
`# python name.py` is one, run without ranks. The others of a page continue each other, in one process. A `text` block right
under a block of code is its output, of all ranks.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.recipes.launch import run_alone
from tests.world import run_ranks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
FENCES = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:```text\n(?P<output>.*?)^```$)?", re.MULTILINE | re.DOTALL)
RANKS = re.compile(r"# torchrun --nproc-per-node (\d+) ")
SCRIPT = "# python "
NUMBER = re.compile(r"\d+\.\d+(?:e[+-]\d+)?")
# torch.compile probes objects while it traces: .grad of non-leaves, and on 2.11 instances of autograd functions.
TRACING = r"The \.grad attribute of a Tensor that is not a leaf|.* should not be instantiated"
TOL_PRINTED = 2e-5  # relative, and absolute near 0; other processors and torch versions sum in another order


@dataclass(frozen=True, kw_only=True)
class Block:
    code: str
    line: int  # lines of the page before it
    output: str | None

    @property
    def ranks(self) -> int | None:
        """None where the block continues those before."""
        found = RANKS.match(self.code)
        return int(found[1]) if found else None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(code=found["code"], line=text.count("\n", 0, found.start("code")), output=found["output"])
        for found in FENCES.finditer(text)
    ]


def run_blocks(blocks: list[Block], page: str, folder: str) -> list[str]:
    """What each prints on this rank. Lines keep the page's numbers, so a traceback points into the page."""
    os.chdir(folder)
    warnings.filterwarnings("ignore", message=TRACING)
    if blocks[0].ranks:
        torch.seed()  # which forked ranks share, and those that torchrun starts do not
    namespace = {"__name__": "__main__"}
    printed = []
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile("\n" * block.line + block.code, page, "exec"), namespace)
        printed.append(output.getvalue())
    return printed


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES if blocks_of(page)])
def test_blocks_run_and_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    assert len(blocks) == page.read_text().count("```python"), "a fence is not closed, or is indented"
    for block in blocks:
        if block.code.startswith(SCRIPT):
            script = tmp_path / "block.py"
            script.write_text(block.code)
            status, printed = run_alone(script, tmp_path, timeout_s=200)
            assert status == 0, printed
            compare(printed, block.output or "", f"{page.name}, the block at line {block.line + 1}")
    alone = [[block] for block in blocks if block.ranks]
    together = [block for block in blocks if not block.ranks and not block.code.startswith(SCRIPT)]
    for group in [*alone, together] if together else alone:
        folder = tmp_path / str(group[0].line)
        folder.mkdir()
        by_rank = run_ranks(group[0].ranks or 1, run_blocks, group, str(page), str(folder))
        for block, printed in zip(group, zip(*by_rank, strict=True), strict=True):
            if block.output is not None:
                compare("".join(printed), block.output, f"{page.name}, the block at line {block.line + 1}")


def compare(printed: str, said: str, where: str) -> None:
    assert NUMBER.sub("#.#", printed) == NUMBER.sub("#.#", said), where
    numbers, expected = ([float(number) for number in NUMBER.findall(text)] for text in (printed, said))
    assert numbers == pytest.approx(expected, rel=TOL_PRINTED, abs=TOL_PRINTED), where
