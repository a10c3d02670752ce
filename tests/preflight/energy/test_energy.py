"""Energy plans against brute force, bounds that follow from idle time, and the precedence of the schedule's own rows."""

from __future__ import annotations

import csv
import itertools
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.errors import PlanError
from meshkit.parallel.pipeline import Row, Schedule, Times, dependencies
from meshkit.parallel.pipeline.schedules import NAMES, named, one_f_one_b, zbv
from meshkit.preflight.energy import EnergyPlan, PowerPoint, front, front_svg, plan_energy, svg, write_csv

draws = settings(deadline=None, max_examples=25)  # a busy machine
TOL_SOLVER = 1e-6  # of joules and seconds: HiGHS' tolerance

# A clock's slowdown falls short of 1 / clock, since memory and links keep their speed.
POINTS = (
    PowerPoint(mhz=1980, watts=700, slowdown=1.0),
    PowerPoint(mhz=1700, watts=560, slowdown=1.1),
    PowerPoint(mhz=1410, watts=450, slowdown=1.27),
    PowerPoint(mhz=1100, watts=370, slowdown=1.55),
)
IDLE = 100.0


# --------------------------------------------------------------------------------------------------------- brute force

SECONDS = {(0, "F"): (2, 3), (1, "F"): (3, 4), (0, "B"): (3, 4, 5), (1, "B"): (4, 5, 6)}  # by stage and op


def _points(seed: int) -> dict[tuple[int, str], list[PowerPoint]]:
    """Whole seconds a second apart, so the program's corners are clocks: precedence and such steps make it a flow's dual."""
    random = np.random.default_rng(seed)
    points = {}
    for key, seconds in SECONDS.items():
        saved = np.sort(random.uniform(50, 300, len(seconds) - 1))[::-1]  # less with each second: convex
        joules = 400 * seconds[-1] - np.concatenate([[0], np.cumsum(saved)])
        points[key] = [
            PowerPoint(mhz=2000 - 100 * i, watts=IDLE + joules[i] / second, slowdown=second / seconds[0])
            for i, second in enumerate(seconds)
        ]
    return points


def _least(points: dict[tuple[int, str], list[PowerPoint]], schedule: Schedule, step_s: float) -> float:
    """Every clock of every row tried; the schedule's precedence is written out by hand for 1F1B of 2 ranks."""
    rows = list(schedule.rows())
    kept = [points[row.stage, row.op] for row in rows]
    picked = np.array(list(itertools.product(*(range(len(each)) for each in kept))))  # [combinations, rows]
    base = [SECONDS[row.stage, row.op][0] for row in rows]
    seconds = np.stack([base[i] * np.array([p.slowdown for p in kept[i]])[picked[:, i]] for i in range(len(rows))], 1)
    watts = np.stack([np.array([p.watts for p in kept[i]])[picked[:, i]] for i in range(len(rows))], 1)
    column = {(row.stage, row.op, row.microbatch): i for i, row in enumerate(rows)}
    ends: dict[int, np.ndarray] = {}
    order = ["0F0", "0F1", "1F0", "1B0", "0B0", "0F2", "1F1", "1B1", "0B1", "1F2", "1B2", "0B2"]
    for name in order:
        stage, op, microbatch = int(name[0]), name[1], int(name[2])
        me = column[stage, op, microbatch]
        waits = [column[0, "F", microbatch]] if (stage, op) == (1, "F") else []
        waits += [column[1, "B", microbatch]] if (stage, op) == (0, "B") else []
        waits += [me - 1] if me and rows[me - 1].rank == rows[me].rank else []
        starts = np.maximum.reduce([ends[i] for i in waits]) if waits else np.zeros(len(picked))
        ends[me] = starts + seconds[:, me]
    in_time = np.maximum.reduce(list(ends.values())) <= step_s + 1e-9
    joules = (seconds * watts).sum(1) + IDLE * (2 * step_s - seconds.sum(1))
    return float(joules[in_time].min())


@pytest.mark.parametrize("seed", range(4))
def test_it_equals_brute_force_on_2_ranks_and_3_microbatches(seed: int) -> None:
    schedule, points = one_f_one_b(2, 3), _points(seed)
    times = Times(f_s=(2.0, 3.0), b_s=(3.0, 4.0))
    shortest_s = plan_energy(schedule, times, power=POINTS, idle_watts=IDLE).full.makespan_s
    assert shortest_s == 26
    for longer_s in (0, 1, 3, 6):
        plan = plan_energy(
            schedule,
            times,
            power=lambda row: points[row.stage, row.op],
            idle_watts=IDLE,
            slowdown=longer_s / shortest_s,
        )
        least = _least(points, schedule, shortest_s + longer_s)
        assert plan.least_joules == pytest.approx(least, rel=TOL_SOLVER)
        assert plan.joules == pytest.approx(least, rel=TOL_SOLVER)


# -------------------------------------------------------------------------------------------------------------- bounds


def _steepest() -> float:
    """Joules saved by the first second that a row takes longer: watts at full clock that are not those of waiting."""
    return max(
        ((POINTS[0].watts - IDLE) - (point.watts - IDLE) * point.slowdown) / (point.slowdown - 1)
        for point in POINTS[1:]
    )


@draws
@given(
    name=st.sampled_from(sorted(set(NAMES) - {"auto"})),
    p=st.integers(1, 4),
    m=st.integers(1, 8),
    f=st.sampled_from([0.5, 1.0, 2.0]),
    w=st.sampled_from([0.5, 1.0]),
    hop=st.sampled_from([0.0, 0.2]),
)
def test_no_more_is_saved_than_idle_time_allows(name: str, p: int, m: int, f: float, w: float, hop: float) -> None:
    """Rows of a rank get longer only into its own idle time."""
    plan = plan_energy(named(name)(p, m), Times(f_s=f, w_s=w, hop_s=hop), power=POINTS, idle_watts=IDLE)
    idle_s = sum(plan.full.makespan_s - busy_s for busy_s in plan.full.busy_s)
    assert -TOL_SOLVER <= plan.full_joules - plan.least_joules <= idle_s * _steepest() + TOL_SOLVER * plan.full_joules
    _fits(plan)


def _fits(plan: EnergyPlan) -> None:
    """Every row runs after what it waits for, as long as its clock says, within the step; joules add up."""
    events = plan.planned.events
    for before, after, hop_s in dependencies(plan.full.schedule, plan.full.times):
        assert events[after[0]][after[1]].start_s >= events[before[0]][before[1]].end_s + hop_s - 1e-9
    assert plan.planned.makespan_s <= plan.step_s * (1 + TOL_SOLVER)
    joules = IDLE * plan.step_s * plan.full.schedule.world
    for full, planned, points in zip(plan.full.events, events, plan.points, strict=True):
        for at_full, event, point in zip(full, planned, points, strict=True):
            seconds = event.end_s - event.start_s
            assert seconds == pytest.approx((at_full.end_s - at_full.start_s) * point.slowdown)
            joules += seconds * (point.watts - IDLE)
    assert plan.joules == pytest.approx(joules)
    assert plan.least_joules <= plan.joules * (1 + TOL_SOLVER)
    assert (
        plan.joules <= plan.full_joules + IDLE * plan.full.schedule.world * (plan.step_s - plan.full.makespan_s) + 1e-6
    )


@draws
@given(p=st.integers(2, 4), rounds=st.integers(6, 8), scale=st.floats(0.01, 10))
def test_a_balanced_zero_bubble_table_saves_about_nothing(p: int, rounds: int, scale: float) -> None:
    plan = plan_energy(zbv(p, p * rounds), Times(f_s=scale, i_s=scale, w_s=scale), power=POINTS, idle_watts=IDLE)
    assert 0 <= plan.saved < 0.01
    assert plan.saved < plan.full.bubble_rate


def test_one_rank_has_no_slack() -> None:
    plan = plan_energy(one_f_one_b(1, 4), power=POINTS, idle_watts=IDLE)
    assert plan.saved == 0
    assert {point.mhz for point in plan.points[0]} == {1980}


def _unequal(heavier: float, stages: int = 4) -> Times:
    seconds = (1.0,) * (stages - 1) + (heavier,)
    return Times(f_s=seconds, i_s=seconds, w_s=seconds)


def test_1f1b_with_unequal_stages_saves_a_tenth_and_more_without_slowdown() -> None:
    """Chung et al. 2024 report 10 to 30 % for real models, whose stages differ by 2 to 30 % and more."""
    saved = [plan_energy(one_f_one_b(4, 16), _unequal(x), power=POINTS, idle_watts=IDLE).saved for x in (1, 1.1, 1.3)]
    assert saved[0] < saved[1] < saved[2]
    assert 0.10 < saved[2] < 0.20
    slower = plan_energy(one_f_one_b(4, 16), _unequal(1.3), power=POINTS, idle_watts=IDLE, slowdown=0.01)
    assert slower.saved > saved[2]


def test_the_front_falls_and_gets_flatter() -> None:
    plans = front(one_f_one_b(4, 8), _unequal(1.2), power=POINTS, idle_watts=IDLE, count=6)
    assert plans[0].slowdown == 0
    least = np.array([plan.least_joules for plan in plans])
    assert (np.diff(least) <= TOL_SOLVER * least[0]).all()
    assert (np.diff(least, 2) >= -TOL_SOLVER * least[0]).all()
    # Beyond its end a step saves nothing: waiting costs more than slower rows give.
    beyond = plan_energy(
        one_f_one_b(4, 8), _unequal(1.2), power=POINTS, idle_watts=IDLE, slowdown=plans[-1].slowdown + 0.1
    )
    assert beyond.least_joules > least[-1]
    for plan in plans:
        _fits(plan)


def test_without_slower_clocks_the_front_is_one_plan() -> None:
    assert len(front(one_f_one_b(2, 4), power=POINTS[:1], idle_watts=IDLE)) == 1


def test_a_step_may_wait_for_a_slower_pipeline() -> None:
    """Perseus' other saving: what the slowest of several pipelines takes is free for the others."""
    plan = plan_energy(one_f_one_b(2, 4), power=POINTS, idle_watts=IDLE, slowdown=0.55)
    assert plan.slowdown == pytest.approx(0.55)
    assert {point.mhz for rank in plan.points for point in rank} == {1100}


def test_all_devices_of_a_rank_count() -> None:
    one, eight = (
        plan_energy(one_f_one_b(2, 4), _unequal(1.3, 2), power=POINTS, idle_watts=IDLE, devices=n) for n in (1, 8)
    )
    assert (eight.joules, eight.full_joules) == pytest.approx((8 * one.joules, 8 * one.full_joules))


def test_points_that_others_beat_are_not_used() -> None:
    worse = (*POINTS, PowerPoint(mhz=900, watts=369, slowdown=1.9), PowerPoint(mhz=1650, watts=600, slowdown=1.1))
    plan, same = (
        plan_energy(one_f_one_b(4, 8), _unequal(1.3), power=power, idle_watts=IDLE) for power in (POINTS, worse)
    )
    assert same.joules == plan.joules
    assert {point.mhz for rank in same.points for point in rank} <= {point.mhz for point in POINTS}


def test_eight_ranks_and_32_microbatches_take_a_second_or_two() -> None:
    plan = plan_energy(one_f_one_b(8, 32), _unequal(1.3, 8), power=POINTS, idle_watts=IDLE)
    assert plan.saved > 0.1


# -------------------------------------------------------------------------------------------------- files and pictures

PLAN = plan_energy(one_f_one_b(2, 3), _unequal(1.3, 2), power=POINTS, idle_watts=IDLE)


def test_the_csv_has_a_line_for_each_row(tmp_path: Path) -> None:
    write_csv(PLAN, tmp_path / "plan.csv")
    lines = list(csv.DictReader((tmp_path / "plan.csv").read_text().splitlines()))
    told = [(int(line["rank"]), int(line["row"]), line["task"], float(line["mhz"])) for line in lines]
    assert told == [
        (rank, index, str(event.row), point.mhz)
        for rank, (events, points) in enumerate(zip(PLAN.planned.events, PLAN.points, strict=True))
        for index, (event, point) in enumerate(zip(events, points, strict=True))
    ]
    assert float(lines[0]["end_s"]) == pytest.approx(PLAN.planned.events[0][0].end_s)


def test_the_picture_has_both_steps_and_a_colour_for_each_clock() -> None:
    picture = ET.fromstring(svg(PLAN))
    tasks = [rect for rect in picture.iter("{http://www.w3.org/2000/svg}rect") if rect.get("class") == "task"]
    assert len(tasks) == 2 * 12
    clocks = {point.mhz for rank in PLAN.points for point in rank}
    assert len({rect.get("fill") for rect in tasks[12:]}) == len(clocks) > 1
    assert len({rect.get("fill") for rect in tasks[:12]}) == 1
    titles = [title.text or "" for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert any(re.search(r"0B1: .*, 1\d00 MHz, \d+ W", title) for title in titles)


@pytest.mark.parametrize("points", [POINTS, POINTS[:1]])
def test_the_front_is_drawn(points: Sequence[PowerPoint]) -> None:
    plans = front(one_f_one_b(2, 3), _unequal(1.3, 2), power=points, idle_watts=IDLE, count=4)
    picture = ET.fromstring(front_svg(plans))
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}circle"))) == len(plans) + 1


def test_it_prints_joules_and_clocks() -> None:
    lines = str(PLAN).splitlines()
    assert lines[1].startswith("full clock")
    assert f"{PLAN.saved:.2%} saved, 0.00% slower" in lines[2]
    assert lines[5].split() == ["rows", "at", "MHz", *(f"{mhz:g}" for mhz in sorted(_clocks(), reverse=True))]


def _clocks() -> set[float]:
    return {point.mhz for rank in PLAN.points for point in rank}


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("power", "match"),
    [
        ((), "power=\\[\\]: give at least one PowerPoint"),
        (POINTS[1:], "the fastest of 3 power points has a slowdown of 1.1, not 1"),
        ((*POINTS, replace(POINTS[0], watts=-1.0)), "watts=-1.0.*needs MHz above 0, watts from 0 up"),
    ],
)
def test_points_that_are_none_are_refused(power: Sequence[PowerPoint], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        plan_energy(one_f_one_b(2, 2), power=power, idle_watts=IDLE)


def test_odd_numbers_are_refused() -> None:
    with pytest.raises(PlanError, match="slowdown=-0.1: give a share from 0 up"):
        plan_energy(one_f_one_b(2, 2), power=POINTS, idle_watts=IDLE, slowdown=-0.1)
    with pytest.raises(PlanError, match="idle_watts=-1"):
        plan_energy(one_f_one_b(2, 2), power=POINTS, idle_watts=-1)
    with pytest.raises(PlanError, match="devices=0"):
        plan_energy(one_f_one_b(2, 2), power=POINTS, idle_watts=IDLE, devices=0)


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(PlanError, match=r'pip install "meshkit\[search\]"'):
        plan_energy(one_f_one_b(2, 2), power=POINTS, idle_watts=IDLE)


def test_rows_of_no_time_are_planned() -> None:
    table = Schedule(
        "forward", 2, (0, 1), ((Row(0, 0, "F", 0), Row(0, 0, "F", 1)), (Row(1, 1, "F", 0), Row(1, 1, "F", 1)))
    )
    plan = plan_energy(table, Times(f_s=(0.0, 1.0)), power=POINTS, idle_watts=IDLE)
    assert plan.step_s == 2
    _fits(plan)
