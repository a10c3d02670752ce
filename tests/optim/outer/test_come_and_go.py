"""Replicas that come and go: equal to their definition, alike bit for bit, whenever one is lost, and nobody waits long."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from meshkit.optim.outer import CO2, DiLoCo, LocalSGD, Policy
from tests.compare_shards import difference
from tests.optim.outer.jobs import Jobs, jobs
from tests.optim.outer.oracles import come_and_go
from tests.optim.outer.test_local_updates import TOL_FP64_SUM, adamw, data, model

EVERY, STEPS = 3, 12
POLICY = DiLoCo(every=EVERY)
HOST = socket.gethostname()
QUICK_S = 10.0  # half of the grace periods beside it: nobody waited for one; and others may use the machine


def alike(told: Jobs, *names: str, rank: int = 0) -> None:
    """After each meeting all replicas that were at it have the same outer state, and so has one that comes."""
    digests: dict[int, set[str]] = {}
    for name in names:
        for line in told.told(name, rank):
            step = line.get("step", line.get("joined"))
            if step is not None:
                digests.setdefault(step, set()).add(line["digest"])
    assert digests and all(len(found) == 1 for found in digests.values()), digests


@pytest.mark.parametrize(("spec", "ranks"), [("dp_shard=1", 1), ("dp_shard=2", 2), ("tp=2", 2)])
def test_a_replica_that_misses_a_meeting_and_one_that_comes_equal_the_definition(
    tmp_path: Path, spec: str, ranks: int
) -> None:
    meetings, comes = [{0, 1, 2}, {0, 1}, {0, 1}, {0, 1, 2}], {2: [2]}
    outer, moments = come_and_go(
        model(),
        data(STEPS, 3, last_is_empty=False),
        adamw,
        every=EVERY,
        lr=0.7,
        momentum=0.9,
        meetings=meetings,
        comes=comes,
    )
    with jobs(tmp_path, replicas=3, grace_s=20) as each:
        common = {"steps": STEPS, "ranks": ranks, "spec": spec}
        for name in "ab":
            each.start(name, POLICY, gates=(8,), **common)
        each.wait_until(f"replica 1 on {HOST} has come")
        each.start("c", POLICY, dies=("step", 5), victim=ranks - 1, **common)
        assert each.end("c")[-1] == -9
        each.start("d", POLICY, **common)
        each.wait_until(f"replica 2 on {HOST} has come", times=2)
        each.open_gate(8)
        for name in "abd":
            assert set(each.end(name)) == {0}
        for rank in range(ranks):
            alike(each, *"abcd", rank=rank)
        slots = [set(line["slots"]) for line in each.told("a") if "step" in line]
        assert slots == meetings, slots
        worst = 0.0
        for name in "abd":
            found = each.result(name)
            worst = max(worst, *(difference(found["values"][key], value) for key, value in outer.items()))
            worst = max(worst, *(difference(found["momentum"][key], value) for key, value in moments.items()))
        assert worst <= TOL_FP64_SUM


def start_three(each: Jobs, policy: Policy, *, third: dict[str, object] | None = None, **common: object) -> None:
    """a, b and c, with the slots 0, 1 and 2."""
    for index, name in enumerate("abc"):
        each.start(name, policy, **{**common, **((third or {}) if name == "c" else {})})
        each.wait_until(f"replica {index} on {HOST} has come")


def slots_of(each: Jobs, name: str) -> list[list[int]]:
    return [line["slots"] for line in each.told(name) if "step" in line]


def longest_stop_s(each: Jobs, *names: str) -> float:
    return max(line["took"] for name in names for line in each.told(name) if "took" in line)


KINDS = {
    "diloco": DiLoCo(every=3, wire="int8"),
    "local sgd": LocalSGD(every=3),
    "fragments": DiLoCo(every=6, fragments=2, mixing=0.5, wire="int4"),
    "streaming": DiLoCo(every=6, fragments=2, delay=1, mixing=0.5, wire="int8"),
}


@pytest.mark.parametrize("policy", KINDS.values(), ids=KINDS)
def test_wherever_a_replica_is_killed_in_a_period_the_others_end_with_the_same_bits(
    tmp_path: Path, policy: Policy
) -> None:
    """Also the errors that rounding took: nothing of a meeting that did not count stays."""
    ends = {}
    for where in ("step", "here", "turn", "done"):
        folder = tmp_path / where
        folder.mkdir()
        with jobs(folder, replicas=3, grace_s=20) as each:
            start_three(each, policy, third={"dies": (where, 6)}, steps=10)
            assert each.end("c") == [-9]
            for name in "ab":
                assert each.end(name) == [0]
                assert slots_of(each, name) == [[0, 1, 2], [0, 1], [0, 1]], where
            alike(each, *"abc")
            assert longest_stop_s(each, "a", "b") < QUICK_S
            ends[where] = [each.told(name)[-1]["digest"] for name in "ab"]
    assert len({digest for found in ends.values() for digest in found}) == 1, ends


def test_one_of_two_ranks_of_a_replica_is_killed_in_an_exchange(tmp_path: Path) -> None:
    with jobs(tmp_path, replicas=3, grace_s=20) as each:
        third = {"dies": ("turn", 6), "victim": 1}
        start_three(each, POLICY, third=third, steps=9, ranks=2, spec="dp_shard=2")
        assert -9 in each.end("c")
        for name in "ab":
            assert each.end(name) == [0, 0]
            assert slots_of(each, name) == [[0, 1, 2], [0, 1], [0, 1]]
        for rank in range(2):
            alike(each, *"abc", rank=rank)
        assert longest_stop_s(each, "a", "b") < QUICK_S


def test_one_that_dies_while_it_comes_and_one_that_dies_while_it_gives_hold_nobody_up(tmp_path: Path) -> None:
    with jobs(tmp_path, replicas=4, quorum=2, grace_s=20) as each:
        each.start("a", POLICY, steps=12, gates=(4, 8), dies=("give", 9))
        each.wait_until(f"replica 0 on {HOST} has come")
        each.start("b", POLICY, steps=12, gates=(4, 8, 12))
        each.wait_until("has the newest state")
        each.start("c", POLICY, steps=12, dies=("join", 0))
        each.wait_until(f"replica 2 on {HOST} has come")
        each.open_gate(4)  # c gets the state after step 6
        assert each.end("c") == [-9]
        each.start("d", POLICY, steps=12, gates=(12,))
        each.wait_until(f"replica 2 on {HOST} has come", times=2)
        each.open_gate(8)  # d was to get it from a after step 9, and gets it from b after step 12
        assert each.end("a") == [-9]
        each.open_gate(12)
        for name in "bd":
            assert each.end(name) == [0], each.lines
        alike(each, *"abd")
        assert each.told("d")[0]["joined"] == 12
        assert longest_stop_s(each, "b") < QUICK_S


@pytest.mark.parametrize("where", ["step", "turn"])
def test_one_that_hangs_is_waited_for_as_long_as_is_said(tmp_path: Path, where: str) -> None:
    with jobs(tmp_path, replicas=3, grace_s=3) as each:
        start_three(each, POLICY, third={"dies": (where, 6), "stops": True}, steps=9)
        for name in "ab":
            assert each.end(name) == [0]
            assert slots_of(each, name) == [[0, 1, 2], [0, 1], [0, 1]]
        alike(each, *"ab")
        assert 1.0 < longest_stop_s(each, "a", "b") < 3 + QUICK_S
        assert any(f"replica 2 on {HOST} is left behind" in line for line in each.lines)


def test_one_that_is_late_or_not_finite_is_left_behind_and_comes_back_with_the_others_state(tmp_path: Path) -> None:
    with jobs(tmp_path, replicas=3, grace_s=1.5) as each:
        slow = dict.fromkeys((7, 8, 9), 0.7)  # it has come by then
        third = {"slow": {5: 2.5, **slow}, "bad_step": 13}
        start_three(each, POLICY, third=third, steps=18, slow=slow)
        for name in "abc":
            assert each.end(name) == [0], each.lines
        alike(each, *"abc")
        assert longest_stop_s(each, "a", "b") < 1.5 + QUICK_S
        assert any("it did not come within 1.5 s" in line for line in each.lines)
        assert any("its values are not finite" in line for line in each.lines)
        was_there = [2 in slots for slots in slots_of(each, "a")]
        assert was_there[:5] == [True, False, False, True, False], each.lines


def test_without_the_place_all_end_with_one_line(tmp_path: Path) -> None:
    with jobs(tmp_path, replicas=2, grace_s=3) as each:
        for name in "ab":
            each.start(name, POLICY, steps=400, slow=dict.fromkeys(range(400), 0.02))
        each.wait_until("has the newest state")
        time.sleep(0.5)
        ended = time.time()
        each.end_place()
        for name in "ab":
            assert each.end(name) == [3]
            assert f"MeetingError: the meeting place {each.address} is gone" in each.told(name)[-1]["error"]
            assert each.told(name)[-1]["at"] - ended < 3 + QUICK_S


def test_another_layout_a_full_place_and_too_few_are_refused(tmp_path: Path) -> None:
    with jobs(tmp_path, replicas=2, quorum=2, grace_s=2, patience_s=4) as each:
        each.start("a", POLICY, steps=3)
        each.wait_until("has come")
        each.start("b", DiLoCo(every=4), steps=3)
        assert each.end("b") == [3]
        assert "replicas that meet are laid out alike: its policy is DiLoCo(every=4" in each.told("b")[-1]["error"]
        each.start("c", POLICY, steps=3, spec="tp=2", ranks=2)
        assert 3 in each.end("c")
        assert "it has 2 ranks, and replica 0" in each.told("c")[-1]["error"]
        assert each.end("a") == [3]
        assert "1 of a quorum of 2 replicas came within 4 s" in each.told("a")[-1]["error"]
        for name in "de":
            each.start(name, POLICY, steps=200, slow=dict.fromkeys(range(200), 0.05))
        each.wait_until("has the newest state")
        each.start("f", POLICY, steps=3)
        assert each.end("f") == [3]
        assert "all 2 slots are taken" in each.told("f")[-1]["error"]


def test_the_one_with_the_newest_state_gives_it_to_all_whatever_they_began_with(tmp_path: Path) -> None:
    with jobs(tmp_path, replicas=2, quorum=2, grace_s=5) as each:
        each.start("a", POLICY, steps=3)
        each.start("b", POLICY, steps=3, seed=6)
        for name in "ab":
            assert each.end(name) == [0]
        alike(each, "a", "b")


@pytest.mark.parametrize("policy", [CO2(every=4), DiLoCo(every=4, fragments=2, delay=2)], ids=str)
def test_a_policy_of_which_something_is_always_in_flight_is_refused(tmp_path: Path, policy: Policy) -> None:
    with jobs(tmp_path, replicas=1, grace_s=5) as each:
        each.start("a", policy, steps=3)
        assert each.end("a") == [3]
        assert "at a meeting place: something is always in flight" in each.told("a")[-1]["error"]


def test_one_that_comes_gets_what_was_in_flight_once_it_has_landed(tmp_path: Path) -> None:
    policy = DiLoCo(every=6, fragments=2, delay=2, wire="int8")
    with jobs(tmp_path, replicas=2, grace_s=10) as each:
        each.start("a", policy, steps=15, gates=(5,))
        each.wait_until(f"replica 0 on {HOST} has come")
        each.wait_until("has the newest state")
        each.start("b", policy, steps=15)
        each.wait_until(f"replica 1 on {HOST} has come")
        each.open_gate(5)
        for name in "ab":
            assert each.end(name) == [0], each.lines
        alike(each, "a", "b")
        assert each.told("b")[0]["joined"] == 8  # what was sent after step 6 lands after step 8
        assert slots_of(each, "a") == [[0], [0], [0, 1], [0, 1]], each.lines


@pytest.mark.parametrize("policy", [POLICY, LocalSGD(every=3)], ids=["diloco", "local sgd"])
def test_values_that_are_not_finite_anywhere_go_back_once_or_end_in_one_line(tmp_path: Path, policy: Policy) -> None:
    with jobs(tmp_path, replicas=2, grace_s=5) as each:
        for name in "ab":
            each.start(name, policy, steps=9, bad_step=5)
        for name in "ab":
            assert each.end(name) == [0 if policy == POLICY else 3], each.lines
        if policy == POLICY:
            alike(each, "a", "b")
            assert sum("they go back to their last meetings" in line for line in each.lines) == 1
            assert all(value.isfinite().all() for value in each.result("a")["values"].values())
        else:
            assert "their policy keeps no outer parameters" in each.told("a")[-1]["error"]


def test_a_comer_whose_giver_hangs_is_told_after_the_grace_period(tmp_path: Path) -> None:
    with jobs(tmp_path, replicas=3, quorum=2, grace_s=2, exchange_s=60) as each:
        each.start("a", POLICY, steps=6, dies=("give", 0), stops=True)
        each.wait_until(f"replica 0 on {HOST} has come")
        for name in "bc":
            each.start(name, POLICY, steps=6)
        began = time.monotonic()
        for name in "bc":
            assert each.end(name) == [0], each.lines
        assert time.monotonic() - began < 30
        alike(each, "b", "c")


def test_another_number_of_steps_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    with jobs(tmp_path, replicas=3, quorum=2, grace_s=5) as each:
        for name in "ab":
            each.start(name, POLICY, steps=9)
            each.wait_until(f"replica {'ab'.index(name)} on {HOST} has come")
        each.start("c", POLICY, steps=3)
        assert each.end("c") == [3]
        assert "its number of steps is 3, and 9 on replica 0" in each.told("c")[-1]["error"]
        for name in "ab":
            assert each.end(name) == [0], each.lines


def test_state_is_handed_on_by_name_whatever_the_order_of_the_optimizer_and_so_are_whole_numbers(
    tmp_path: Path,
) -> None:
    with jobs(tmp_path, replicas=2, grace_s=5) as each:
        each.start("a", POLICY, steps=12, gates=(5,))
        each.wait_until("has the newest state")
        each.start("b", POLICY, steps=12, inner="swapped", seed=6)
        each.wait_until(f"replica 1 on {HOST} has come")
        each.open_gate(5)
        for name in "ab":
            assert each.end(name) == [0], each.lines
            assert each.told(name)[-1]["count"] == 12  # a buffer, counted on by the one that came
        alike(each, "a", "b")
        assert each.told("b")[0]["joined"] > 0


def test_another_optimizer_and_one_that_cannot_be_handed_on_end_alone(tmp_path: Path) -> None:
    with jobs(tmp_path, replicas=2, quorum=1, grace_s=4) as each:
        each.start("a", POLICY, steps=6, gates=(2,))
        each.wait_until("has the newest state")
        each.start("b", POLICY, steps=6, inner="sgd")
        assert each.end("b") == [3]
        assert "its optimizer is torch.optim.sgd.SGD, and torch.optim.adamw.AdamW on" in each.told("b")[-1]["error"]
        each.open_gate(2)
        assert each.end("a") == [0]
    alone = tmp_path / "alone"
    alone.mkdir()
    with jobs(alone, replicas=1, grace_s=4) as each:
        each.start("a", POLICY, steps=6, inner="parts")
        assert each.end("a") == [3]
        assert "PlanError: the optimizer keeps 'moment' as a Parts" in each.told("a")[-1]["error"]
