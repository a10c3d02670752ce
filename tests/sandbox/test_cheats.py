"""No program is paid for what it did not compute: over 50 cheats score 0, and the same tests give honest programs 1."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from meshkit.algos.rewards import SandboxLimits, UnitTests, score
from meshkit.algos.rollout import Rollout
from tests.sandbox.cheats import ROWS, cheats

REWARD = UnitTests(limits=SandboxLimits(wall_s=20.0, cpu_s=2, memory_bytes=256 << 20))


def answer(program: str, tests: str) -> Rollout:
    return Rollout(text=program, ids=np.arange(3), fields={"tests": tests})


@pytest.mark.parametrize("row", ROWS)
def test_honest_programs_pass(row: str) -> None:
    tests, program = ROWS[row]
    scores = score([answer(program, tests), answer(program + "\nf = None", tests)], REWARD)
    np.testing.assert_array_equal(scores.totals, [1, 0])


def test_no_cheat_is_paid() -> None:
    tried = cheats()
    with ThreadPoolExecutor(2) as threads:
        scores = list(threads.map(REWARD, [answer(each.code, ROWS[each.row][0]) for each in tried]))
    paid = {f"{each.name} ({each.row})": score for each, score in zip(tried, scores, strict=True)}
    assert not {name: score for name, score in paid.items() if score != 0.0}


def test_there_are_50_cheats() -> None:
    assert len({(each.row, each.code) for each in cheats()}) >= 50
