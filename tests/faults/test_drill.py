"""Whatever happens to one rank, in whichever block: the job ends in time, and says who, where and when."""

from __future__ import annotations

import random
import re
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.depth import DEEP, deep
from tests.faults.drill import BLOCKS
from tests.recipes.launch import TORCHRUN, command_line, finish, read_losses, run, start_command

SCRIPT = "tests/faults/drill.py"
END_S = 180.0  # with the start, on a loaded machine
TIMEOUT_S = 10 if DEEP else 5  # of collectives, where a rank stays away
AFTER_S = 30.0  # from the fault to the end, and TIMEOUT_S more where a rank stays away; alone it takes a few seconds
FAULTS = ("kill", "raise", "stay", "nan")
PARTS = {"data": "parallel.data", "tensor": "parallel.tensor|core.collectives", "loader": "data"}
PARTS |= {"rollout": "algos", "dataflow": "algos", "reallocate": "algos|core.reshard"}

CELLS = [(block, fault) for block in BLOCKS for fault in FAULTS if fault != "nan" or BLOCKS[block].nan]
# Each block once and each fault about as often; the others when deep.
FEW = list(
    zip(
        BLOCKS,
        ["kill", "nan", "raise", "stay", "kill", "nan", "raise", "kill", "stay", "raise", "stay", "kill"],
        strict=True,
    )
)


def moment_of(block: str, fault: str) -> dict[str, Any]:
    """Where and when, at random, but the same in every run of this cell; anew when deep."""
    draw = random.Random(None if DEEP else f"{block} {fault}")
    return {"rank": draw.randrange(2), "step": draw.randint(2, 4), "moment": draw.randint(1, 12)}


def flags(out: Path, **values: Any) -> list[str]:
    return command_line({"out": out}, **values)


def drilled(block: str, fault: str, out: Path, *, timeout_s: int = TIMEOUT_S) -> tuple[dict[str, Any], int, str, float]:
    """(where and when, exit status, output, seconds from the fault to the end)"""
    at = moment_of(block, fault)
    patience = {"timeout_s": timeout_s, "stall_s": 2} if fault == "stay" else {}
    status, output = run(2, SCRIPT, *flags(out, block=block, fault=fault, **patience, **at), timeout_s=END_S)
    return at, status, output, time.time() - float((out / "struck").read_text())


@pytest.mark.parametrize(("block", "fault"), CELLS if DEEP else FEW)
def test_one_rank_at_fault_ends_the_job_with_its_rank_step_and_block(block: str, fault: str, tmp_path: Path) -> None:
    at, status, output, took_s = drilled(block, fault, tmp_path)
    where = f"{at}, {took_s:.1f} s:\n{output}"
    assert status != 0, where
    assert took_s < AFTER_S + TIMEOUT_S * (fault == "stay"), where
    step = f"step {at['step']}"
    part = PARTS.get(block, f"parallel.{block}|memory.{block}|{block}")
    match fault:
        case "kill":
            # Its peer says where it was waiting, which is the place where the killed one is missed.
            assert re.search(rf"^(It was|rank {1 - at['rank']} was told to end,) at {step}", output, re.MULTILINE), (
                where
            )
            assert re.search(rf"^rank {at['rank']} on \S+ has ended without a word", output, re.MULTILINE), where
        case "raise":
            assert f"HadEnough (rank {at['rank']}): this rank has had enough" in output, where
            assert re.search(rf"^It was at {step}, .*({part})[\w.]*, drill.py:\d+ in _act", output, re.MULTILINE), where
            assert output.count("HadEnough (rank") == 1, where
        case "stay":
            lives = rf"^rank {at['rank']} on \S+ lives, and has been for \d+ s at"
            stays = rf"{lives} {step}, .*({part})[\w.]*, drill.py:\d+ in _act"
            assert len(re.findall(stays, output, re.MULTILINE)) == 2, where  # after stall_s, and at the timeout
        case "nan":
            assert "StepError (rank" in output, where
            assert f"{step}: the gradient norm is nan; the loss of rank" in output, where
            assert re.search(rf"not finite is returned by \S+ on rank {at['rank']}\.", output), where


@cache
def losses_without_fault(block: str) -> dict[int, float]:
    with tempfile.TemporaryDirectory() as folder:
        status, output = run(2, SCRIPT, *flags(Path(folder), block=block))
        assert status == 0, output
        return read_losses(Path(folder))


def test_a_rank_that_is_held_up_for_a_while_changes_nothing_but_is_named(tmp_path: Path) -> None:
    late = {"block": "expert", "fault": "delay", "delay_s": 4, "stall_s": 2, "rank": 0, "moment": 7}
    status, output = run(2, SCRIPT, *flags(tmp_path, **late))
    assert status == 0, output
    assert read_losses(tmp_path) == losses_without_fault("expert")
    assert "rank 1 has waited" in output, output
    lives = r"^rank 0 on \S+ lives, and has been for \d+ s at step 3, .*parallel.expert, drill.py"
    assert len(re.findall(lives, output, re.MULTILINE)) == 1, output


def test_a_killed_job_that_is_started_again_goes_on_to_the_same_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = {**moment_of("expert", "restart"), "step": 4}
    status, output = run(2, SCRIPT, *flags(tmp_path, block="expert", fault="kill", **at))
    assert status != 0, output
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    status, output = run(2, SCRIPT, *flags(tmp_path, block="expert", fault="kill", **at))
    assert status == 0, output
    assert read_losses(tmp_path) == losses_without_fault("expert")


@deep
@pytest.mark.parametrize("block", BLOCKS)
def test_torchrun_restarts_a_killed_job_which_goes_on_to_the_same_loss(block: str, tmp_path: Path) -> None:
    at = {**moment_of(block, "restart"), "step": 4}
    command = [*TORCHRUN, "--standalone", "--max-restarts", "1", "--nproc-per-node", "2", SCRIPT]
    status, output = finish(start_command([*command, *flags(tmp_path, block=block, fault="kill", **at)]))
    assert status == 0, output
    assert read_losses(tmp_path) == losses_without_fault(block), output
    assert re.search(rf"^rank {at['rank']} on \S+ has ended without a word", output, re.MULTILINE), output
