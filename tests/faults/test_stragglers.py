"""The rank that keeps the others waiting is named, and one that only waits is not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import meshkit as mk
from meshkit.faults.stragglers import Report, Span, uncovered_s
from meshkit.metrics import Stragglers
from tests.checkpoint.training import build
from tests.world import pool

HELD_S = 0.25
PLACES = ("loader", "forward", "nowhere")


def held_up(
    spec: str, slow: int, place: str, factor: float = 2
) -> tuple[list[int], list[float], list[str], list[float]]:
    """(steps with a report, work of each rank, hosts, what the last step took each rank by the clock)"""
    training = build(spec, num_hidden_layers=2)
    run = training.run
    stragglers = Stragglers(run.mesh, every_steps=4, steps=2, factor=factor)
    reports, walls = [], []

    def work(where: str) -> None:
        if place == where and run.mesh.rank == slow:
            time.sleep(HELD_S)

    def before(*_: object) -> None:
        work("forward")

    next(module for name, module in run.model.named_modules() if "self_attn" in name).register_forward_pre_hook(before)
    for step in range(1, 9):
        began = time.perf_counter()
        with stragglers.measure(step):
            work("loader")
            training.train(1)
        walls.append(time.perf_counter() - began)
        reports += [step] if stragglers.last is not None and stragglers.last.step == step else []
    assert stragglers.last is not None
    named = str(stragglers.slow or "")
    return reports, list(stragglers.last.busy_s), [*stragglers.last.hosts, named], walls[-1:]


@pytest.mark.parametrize(
    ("spec", "slow", "place"), [("dp_shard=2", 1, "loader"), ("tp=2", 0, "forward"), ("pp=2", 1, "forward")]
)
def test_the_rank_that_works_longer_is_named_though_all_ranks_take_as_long(spec: str, slow: int, place: str) -> None:
    found = pool(2).run(held_up, spec, slow, place)
    for reports, busy_s, hosts, (wall_s,) in found:
        assert reports == [4, 6, 8]  # the second confirms the first
        assert wall_s >= HELD_S  # by the clock the ranks are alike
        assert busy_s[slow] >= HELD_S
        assert busy_s[slow] > 2 * busy_s[1 - slow], busy_s
        assert f"step 8: rank {slow} on {hosts[slow]} is the slowest" in hosts[-1]


def test_ranks_with_the_same_work_name_nobody() -> None:
    found = pool(2).run(held_up, "dp_shard=2", 0, "nowhere", 20)  # a loaded machine may hold one up a little
    assert [hosts[-1] for _, _, hosts, _ in found] == ["", ""]


def test_a_rank_is_slow_only_if_a_step_takes_longer_by_it() -> None:
    """The rest of the step is a slow link, say, and nobody waits for the rank."""
    report = Report(step=8, ranks=(0, 1, 2, 3), busy_s=(0.06, 0.06, 0.06, 0.13), hosts=("a",) * 4, step_s=1.5)
    assert report.over_median > 2 and not report.has_straggler(2)
    assert replace(report, step_s=0.3).has_straggler(2)
    busy = replace(report, step_s=0.3, most_busy_s=(0.2, 0.3, 0.2, 0.2))  # others take as long now and then
    assert not busy.has_straggler(2)
    assert replace(busy, most_busy_s=(0.07, 0.3, 0.08, 0.2)).has_straggler(2)


def cover(spans: Sequence[Span]) -> set[int]:
    return {at for start, end in spans for at in range(int(start), int(end))}


def test_time_of_collectives_alone_is_what_no_kernel_covers() -> None:
    torch.manual_seed(0)
    for _ in range(50):
        draws = torch.randint(0, 20, (8, 2)).sort(1).values.tolist()
        some, others = [tuple(span) for span in draws[:4]], [tuple(span) for span in draws[4:]]
        assert uncovered_s(some, others) == len(cover(some) - cover(others))


def test_numbers_that_measure_nothing_are_refused() -> None:
    with pytest.raises(mk.MeshkitError, match=r"Stragglers\(every_steps=2, steps=3, factor=1.5\): measure at least 1"):
        Stragglers(None, every_steps=2, steps=3)  # type: ignore[arg-type]
