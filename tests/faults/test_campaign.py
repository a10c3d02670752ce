"""Some cases of the campaign, one of each kind: rank, host, call and cause are right, under each launcher."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.depth import deep
from tests.faults.campaign import ASPECTS, FAULTS, LAUNCHERS, Case, draw, judged, run


def case(fault: str, launcher: str, mesh: str, block: str, rank: int, **more: int) -> Case:
    at = {"number": 7, "step": 3, "moment": 5} | more
    return Case(fault=fault, launcher=launcher, mesh=mesh, block=block, rank=rank, **at)


CASES = [
    case("kill", "plain", "dp_shard=2", "data", 0),  # which has the store: the others said nothing once
    case("kill", "srun", "dp_shard=2 tp=2", "tensor", 0),
    case("raise", "srun", "pp=2", "pipeline", 0),
    case("slow", "plain", "tp=2", "tensor", 1),
]
SLOW_CASES = [
    case("kill", "torchrun", "cp=2", "context", 1),
    case("stall", "plain", "pp=2 dp_shard=2", "pipeline", 3),
    case("cut", "srun", "dp_shard=2", "data", 1),
    case("slow link", "plain", "dp_shard=2", "data", 1),
]


def name(case: Case) -> str:
    return f"{case.fault} {case.launcher}"


def check(case: Case) -> None:
    row = run(case)
    if str(row.get("void", "")).startswith("not run"):
        pytest.skip(row["void"])
    assert row.get("good"), row


@pytest.mark.parametrize("case", CASES, ids=name)
def test_rank_host_call_and_cause_are_named(case: Case) -> None:
    check(case)


@deep
@pytest.mark.parametrize("case", SLOW_CASES, ids=name)
def test_rank_host_call_and_cause_are_named_by_default_after_half_a_minute(case: Case) -> None:
    check(case)


def test_draws_are_the_same_each_time_and_meet_every_fault_under_every_launcher() -> None:
    cases = [draw(number) for number in range(1000)]
    assert cases == [draw(number) for number in range(1000)]
    met = Counter((case.fault, case.launcher) for case in cases)
    assert len(met) == len(FAULTS) * len(LAUNCHERS) and min(met.values()) > 10
    assert {case.size for case in cases} == {2, 4}


def test_the_judge_takes_no_other_rank_call_or_cause_for_right() -> None:
    killed = CASES[0]
    host = killed.host_of(0)
    said = (
        f"rank 0 on {host} has ended without a word (killed, out of memory, or a crash): process 1 is gone.\n"
        "rank 0 is missing in call 12 on dp_shard (all_reduce of 8 B): rank 1 waits in it.\n"
    )
    made = {"calls": [["dp_shard", False, 11]]}
    assert all(judged(killed, [said], made).values())
    assert not judged(killed, [said.replace("rank 0 on", "rank 1 on")], made)["rank"]
    assert not judged(killed, [said.replace(f"on {host}", "on elsewhere")], made)["host"]
    assert not judged(killed, [said.replace("call 12", "call 11000")], made)["call"]
    unnamed = said.replace("on dp_shard (", "on ranks 0-1 (")
    assert judged(killed, [unnamed], {"calls": [["", False, 11]]})["call"]
    assert not judged(killed, [unnamed], {"calls": [["", False, 9]]})["call"]
    assert not judged(killed, [said.replace("rank 0 is missing", "rank 1 is missing")], made)["call"]
    assert not any(judged(killed, [""], made)[aspect] for aspect in ASPECTS if aspect != "in_time")
