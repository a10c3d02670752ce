"""Garbage is collected in chosen steps, fp32 products are as asked for, and launch lines are what torchrun takes."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

from meshkit.recipes.process import collecting_garbage, multiplying_fp32

ROOT = Path(__file__).parents[2]


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_garbage_goes_in_the_chosen_steps_and_in_no_other() -> None:
    assert gc.isenabled()
    with collecting_garbage(3) as after:
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        for step in range(1, 8):
            cycle = weakref.ref(Cycle())
            after(step)
            assert (cycle() is None) == (step % 3 == 0)
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_0_leaves_it_to_python() -> None:
    with collecting_garbage(0) as after:
        assert gc.isenabled() and gc.get_freeze_count() == 0
        after(1)


def test_a_process_that_collects_nothing_goes_on_so() -> None:
    gc.disable()
    try:
        with pytest.raises(KeyError), collecting_garbage(2):
            raise KeyError
        assert not gc.isenabled() and gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_fp32_products_are_as_asked_for_and_as_before_afterwards() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    for precision in ("tf32", "ieee"):
        with multiplying_fp32(precision):
            assert torch.backends.cuda.matmul.fp32_precision == precision
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.parametrize("file", ["README.md", "examples/slurm.sh"])
def test_launch_lines_bind_ranks_and_let_segments_grow(file: str) -> None:
    text = (ROOT / file).read_text().replace("\\\n", " ")
    lines = [
        line for line in text.splitlines() if "torchrun" in line and "--nproc-per-node 8 " in line and "numa" in line
    ]
    assert lines
    for line in lines:
        flags = re.search(r"torchrun (.*?) examples/", line)
        assert flags is not None
        given = get_args_parser().parse_args([*flags[1].replace('"', "").split(), "script.py"])
        assert given.numa_binding == "node"
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text
