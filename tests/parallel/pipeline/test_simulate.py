"""Time, bubbles and memory on paper: published numbers, closed forms, and a naive relaxation as a second opinion."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.errors import PlanError
from meshkit.parallel.pipeline import Op, Row, Schedule, Simulation, Task, Times, overlap, simulate
from meshkit.parallel.pipeline.schedules import gpipe, interleaved, one_f_one_b, zb_h1

draws = settings(deadline=None)  # a busy machine
TOL_SUM = 1e-9  # only the order of summation differs
ranks_drawn = st.integers(1, 6)
microbatches_drawn = st.integers(1, 9)
seconds = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0])

# Qi et al. 2023 (arXiv 2401.10241): ranks, microbatches, profiled F, I, W and hop in ms (table 9), and the bubble rates
# of 1F1B and ZB-H1 (table 5).
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594),
]


@pytest.mark.parametrize(("p", "m", "f", "i", "w", "hop", "of_1f1b", "of_zb_h1"), PUBLISHED)
def test_bubble_rates_are_those_of_the_zero_bubble_paper(
    p: int, m: int, f: float, i: float, w: float, hop: float, of_1f1b: float, of_zb_h1: float
) -> None:
    times = Times(f_s=f, i_s=i, w_s=w, hop_s=hop)
    rates = [simulate(schedule, times).bubble_rate for schedule in (one_f_one_b(p, m), zb_h1(p, m))]
    assert [round(rate, 4) for rate in rates] == [of_1f1b, of_zb_h1]


# -------------------------------------------------------------------------------------------------------- closed forms


@draws
@given(p=ranks_drawn, m=microbatches_drawn, f=seconds, i=seconds, w=seconds)
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_slots(p: int, m: int, f: float, i: float, w: float) -> None:
    times = Times(f_s=f, i_s=i, w_s=w)
    for schedule in (gpipe(p, m), one_f_one_b(p, m)):
        simulation = simulate(schedule, times)
        assert simulation.makespan_s == pytest.approx((m + p - 1) * (f + i + w))
        assert simulation.bubble_rate == pytest.approx((p - 1) / (m + p - 1))


@draws
@given(p=ranks_drawn, rounds=st.integers(1, 3), v=st.integers(1, 3), f=seconds, b=seconds)
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, rounds: int, v: int, f: float, b: float) -> None:
    m = p * rounds
    simulation = simulate(interleaved(p, m, chunks=v), Times(f_s=f, b_s=b))
    assert simulation.makespan_s == pytest.approx((v * m + p - 1) * (f + b))
    assert simulation.bubble_rate == pytest.approx((p - 1) / (v * m + p - 1))


@draws
@given(p=ranks_drawn, m=microbatches_drawn)
def test_gpipe_holds_every_microbatch_and_1f1b_one_per_rank_after_it(p: int, m: int) -> None:
    assert simulate(gpipe(p, m)).peak_units == (m,) * p
    assert simulate(one_f_one_b(p, m)).peak_units == tuple(min(p - rank, m) for rank in range(p))


@draws
@given(p=ranks_drawn, rounds=st.integers(2, 3), v=st.integers(2, 3))
def test_interleaving_holds_v_p_plus_p_minus_1_chunks_on_the_first_rank(p: int, rounds: int, v: int) -> None:
    assert simulate(interleaved(p, p * rounds, chunks=v)).peak_units[0] == v * p + p - 1


@draws
@given(p=ranks_drawn, m=microbatches_drawn, hop=seconds)
def test_gpipe_pays_for_the_hops_of_one_way_there_and_back(p: int, m: int, hop: float) -> None:
    simulation = simulate(gpipe(p, m), Times(hop_s=hop))
    assert simulation.makespan_s == pytest.approx((m + p - 1) * 3 + 2 * (p - 1) * hop)


def test_a_hop_may_depend_on_the_two_ranks() -> None:
    nodes_of_two = Times(hop_s=lambda source, target: 0.125 if source // 2 == target // 2 else 2.0)
    assert simulate(gpipe(4, 1), nodes_of_two).makespan_s == 4 * 3 + 2 * (0.125 + 2.0 + 0.125)


def test_a_hop_inside_a_rank_is_free() -> None:
    v_shape = Schedule("v", 1, (0, 1, 1, 0), (_rows(0, "0F0 3F0 3B0 0B0"), _rows(1, "1F0 2F0 2B0 1B0")))
    assert simulate(v_shape, Times(hop_s=10.0)).makespan_s == 4 * 3 + 4 * 10.0


def test_a_blocking_sender_computes_nothing_during_its_hops() -> None:
    times = Times(hop_s=0.5, blocking=True)
    assert simulate(gpipe(2, 4), times).makespan_s == 4 * 1.5 + 1.0 + 4 * 2.5 + 2.0
    assert simulate(gpipe(1, 4), times).makespan_s == 12


def test_stages_may_differ() -> None:
    times = Times(f_s=(1.0, 2.0), i_s=(3.0, 4.0), w_s=(5.0, 6.0), freed_by_w=(1.0, 10.0))
    simulation = simulate(gpipe(2, 2), times)
    assert [event.end_s for event in simulation.events[1]] == [3.0, 5.0, 15.0, 25.0]
    assert [event.end_s for event in simulation.events[0]] == [1.0, 2.0, 23.0, 33.0]
    assert simulation.peak_units == (2.0, 20.0)
    assert simulation.busy_s == (18.0, 24.0)
    assert simulation.bubble_rate == 1 - 42 / 66


def test_the_span_of_a_rank_leaves_out_the_corners() -> None:
    simulation = simulate(Schedule("forward", 2, (0, 1), (_rows(0, "0F0 0F1"), _rows(1, "1F0 1F1"))))
    assert (simulation.makespan_s, simulation.span_s) == (3.0, (2.0, 2.0))
    assert simulation.bubble_rate == 1 - 4 / 6
    assert simulation.span_bubble_rate == 0.0


def test_b_is_i_and_w_unless_it_has_a_time_of_its_own() -> None:
    assert simulate(gpipe(1, 1), Times(i_s=2.0, w_s=3.0)).makespan_s == 6.0
    assert simulate(gpipe(1, 1), Times(i_s=2.0, w_s=3.0, b_s=4.0)).makespan_s == 5.0


def test_an_overlapped_row_hides_part_of_its_shorter_half() -> None:
    rows = (Row(0, 0, "F", 0), Row(0, 0, "FB", 1, 0, 0), Row(0, 0, "B", 1))
    table = Schedule("overlapped", 2, (0,), (rows,))
    for hidden, expected in ((0.0, 6.0), (0.5, 5.5), (1.0, 5.0)):
        assert simulate(table, Times(fb_s=overlap(hidden))).makespan_s == expected
    assert simulate(table, Times(fb_s=lambda f_s, b_s: 7.0)).makespan_s == 10.0
    assert simulate(table).peak_units == (2.0,)  # both halves hold theirs until the row ends


def test_activations_go_in_two_parts() -> None:
    table = Schedule("split", 2, (0,), (_rows(0, "0F0 0I0 0F1 0I1 0W0 0W1"),))
    simulation = simulate(table, Times(freed_by_i=3.0, freed_by_w=1.0))
    levels = [(level.time_s, level.units) for level in simulation.memory[0]]
    assert levels == [(0, 0), (0, 4), (2, 1), (2, 5), (4, 2), (5, 1), (6, 0)]
    assert simulation.peak_units == (5.0,)
    whole = simulate(gpipe(1, 2), Times(freed_by_i=3.0, freed_by_w=1.0))
    assert [level.units for level in whole.memory[0]] == [0, 4, 8, 4, 0]


# ------------------------------------------------------------------------------------------------------- second opinion


@settings(draws, max_examples=50)
@given(
    p=st.integers(1, 3),
    m=st.integers(1, 4),
    v=st.integers(1, 2),
    split=st.booleans(),
    hop=st.sampled_from([0.0, 0.25, 2.0]),
    data=st.data(),
)
def test_starts_are_the_least_that_every_wait_allows(
    p: int, m: int, v: int, split: bool, hop: float, data: st.DataObject
) -> None:
    schedule = zb_h1(p, m) if split else interleaved(p, m, chunks=v)
    f, i, w = (tuple(data.draw(st.lists(seconds, min_size=n, max_size=n))) for n in [schedule.stages] * 3)
    simulation = simulate(schedule, Times(f_s=f, i_s=i, w_s=w, hop_s=hop))
    expected = relaxed(schedule, f, i, w, hop)
    for rank in simulation.events:
        for row, start_s, _ in rank:
            assert start_s == pytest.approx(expected[row.tasks[0]], abs=TOL_SUM)


def relaxed(
    schedule: Schedule, f: tuple[float, ...], i: tuple[float, ...], w: tuple[float, ...], hop: float
) -> dict[Task, float]:
    """Start everything at 0 and push starts later until no wait is broken."""
    takes = {
        task: {"F": f, "I": i, "W": w, "B": [a + b for a, b in zip(i, w, strict=True)]}[task.op][task.stage]
        for row in schedule.rows()
        for task in row.tasks
    }
    edges = [(a.tasks[0], b.tasks[0], 0.0) for rank in schedule.ranks for a, b in pairwise(rank)]
    for task in takes:
        for op in ("F", "B", "I", "W"):
            for before in (task._replace(op=op, stage=task.stage + step) for step in (-1, 0, 1)):
                if before in takes and (before.op, before.stage - task.stage, task.op) in WAITS:
                    away = schedule.placement[before.stage] != schedule.placement[task.stage]
                    edges.append((before, task, hop if away else 0.0))
    start = dict.fromkeys(takes, 0.0)
    changed = True
    while changed:
        changed = False
        for before, after, gap in edges:
            at = start[before] + takes[before] + gap
            if at > start[after]:
                start[after], changed = at, True
    return start


# (op, stages later than mine, my op)
WAITS = {("F", -1, "F"), ("I", 0, "W")} | {
    wait for mine in "BI" for wait in (("F", 0, mine), ("B", 1, mine), ("I", 1, mine))
}


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_table_that_stops_is_refused() -> None:
    missing = Schedule("mine", 1, (0, 1), (_rows(0, "0F0 0B0"), _rows(1, "1F0")))
    with pytest.raises(
        PlanError,
        match="'mine' stops: in cell 1, 0B0, rank 0 waits for the backward of microb.* 0 through stage 1, which never",
    ):
        simulate(missing)
    upside_down = Schedule("mine", 1, (0,), (_rows(0, "0B0 0F0"),))
    with pytest.raises(PlanError, match="in cell 0, 0B0, rank 0 waits for the forward of microbatch 0 through stage 0"):
        simulate(upside_down)
    weights_first = Schedule("mine", 1, (0,), (_rows(0, "0F0 0W0 0I0"),))
    with pytest.raises(
        PlanError, match="in cell 1, 0W0, rank 0 waits for the backward of microbatch 0 through stage 0"
    ):
        simulate(weights_first)
    crossed = Schedule("mine", 2, (0, 1, 0, 1), (_rows(0, "2F0 0F0"), _rows(1, "1F0 3F0")))
    with pytest.raises(PlanError, match="in cell 0, 2F0, rank 0 waits for the forward of microbatch 0 through stage 1"):
        simulate(crossed)


def test_times_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match="f_s has 3 values, but schedule 'gpipe' has 2 stages"):
        simulate(gpipe(2, 2), Times(f_s=(1.0, 1.0, 1.0)))
    with pytest.raises(PlanError, match=r"w_s=-1\.0 is not a time"):
        simulate(gpipe(2, 2), Times(w_s=-1.0))


def test_nothing_takes_nothing() -> None:
    empty = simulate(Schedule("empty", 0, (0, 1), ((), ())))
    assert isinstance(empty, Simulation)
    assert (empty.makespan_s, empty.bubble_rate, empty.peak_units) == (0.0, 0.0, (0.0, 0.0))


def _rows(rank: int, words: str) -> tuple[Row, ...]:
    ops: dict[str, Op] = {"F": "F", "B": "B", "I": "I", "W": "W"}
    return tuple(Row(rank, int(word[0]), ops[word[1]], int(word[2:])) for word in words.split())
