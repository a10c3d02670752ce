"""Replicas that come and go: equal to their definition, alike bit for bit, whenever one is lost, and nobody waits for long."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshkit.optim.outer import DiLoCo, LocalSGD, Policy
from tests.compare_shards import difference
from tests.optim.outer.jobs import Jobs, jobs
from tests.optim.outer.oracles import come_and_go
from tests.optim.outer.test_local_updates import TOL_FP64_SUM, adamw, data, model

EVERY, STEPS = 3, 12
POLICY = DiLoCo(every=EVERY)


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
        model(), data(STEPS, 3, last_is_empty=False), adamw, every=EVERY, lr=0.7, momentum=0.9, meetings=meetings, comes=comes
    )
    with jobs(tmp_path, replicas=3, grace_s=20) as each:
        common = {"steps": STEPS, "ranks": ranks, "spec": spec}
        for name in "ab":
            each.start(name, POLICY, gates=(8,), **common)
        each.wait_until("replica 1")
        each.start("c", POLICY, dies=("step", 5), victim=ranks - 1, **common)
        assert each.end("c")[-1] == -9
        each.start("d", POLICY, **common)
        each.wait_until("replica 2 on", timeout_s=30)
        while sum("replica 2" in line and "has come" in line for line in each.lines) < 2:
            pass
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
