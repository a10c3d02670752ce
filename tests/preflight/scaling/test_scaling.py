"""Scaling curves and batch advice against laws of their own: perfect scaling is flat, and the critical batch costs twice."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.errors import PlanError
from meshkit.preflight.goodput import Checkpoints, Faults, goodput
from meshkit.preflight.scaling import StepForecast, batch_advice, scaling_curve, svg


def _amdahl(ranks: int) -> StepForecast:
    """1 s that no rank shortens, and 64 s that all share."""
    return StepForecast(ranks=ranks, step_s=1 + 64 / ranks, tokens=2**20, strategy=f"dp_shard={ranks}")


def test_perfect_scaling_costs_the_same_gpu_hours_everywhere() -> None:
    curve = scaling_curve(
        [8, 1, 64], lambda ranks: StepForecast(ranks=ranks, step_s=64 / ranks, tokens=1000), total_tokens=1e9
    )
    assert [point.forecast.ranks for point in curve.points] == [1, 8, 64]
    assert [point.efficiency for point in curve.points] == pytest.approx([1, 1, 1])
    assert [point.gpu_hours for point in curve.points] == pytest.approx([1e6 * 64 / 3600] * 3)


def test_what_does_not_shrink_is_amdahls() -> None:
    curve = scaling_curve([1, 64], _amdahl, total_tokens=2**40)
    assert curve.points[1].tokens_per_s == pytest.approx(2**20 / 2)
    assert curve.points[1].efficiency == pytest.approx(65 / 2 / 64)
    assert curve.points[1].hours == pytest.approx(2**20 * 2 / 3600)


def test_each_point_has_its_own_best_strategy_and_worlds_without_one_are_named() -> None:
    curve = scaling_curve([1, 2, 4, 8], lambda ranks: _amdahl(ranks) if ranks > 2 else None, total_tokens=1e12)
    assert curve.left_out == (1, 2)
    assert [point.forecast.strategy for point in curve.points] == ["dp_shard=4", "dp_shard=8"]
    assert "no strategy fits on 1, 2 ranks" in str(curve)


def test_failures_make_the_largest_world_the_slower_one() -> None:
    """Goodput falls with ranks, so tokens/s have a most."""

    def share(forecast: StepForecast) -> float:
        kind = Checkpoints(name="on storage", blocking_s=60, load_s=1200)
        told = goodput(
            step_s=forecast.step_s,
            ranks=forecast.ranks,
            faults=Faults(device_mtbf_h=2000.0),
            checkpoints=[kind],
        )
        return told.share

    worlds = [2**power for power in range(8, 16)]
    plain = scaling_curve(worlds, _amdahl, total_tokens=1e12)
    failing = scaling_curve(worlds, _amdahl, total_tokens=1e12, goodput=share)
    assert max(plain.points, key=lambda point: point.tokens_per_s) is plain.points[-1]
    assert max(failing.points, key=lambda point: point.tokens_per_s) is not failing.points[-1]


def test_a_deadline_is_met_by_the_fewest_gpu_hours() -> None:
    curve = scaling_curve([1, 8, 64], _amdahl, total_tokens=2**40)
    slow, middle, fast = (point.hours for point in curve.points)
    for hours, ranks in ((slow, 1), ((slow + middle) / 2, 8), (fast, 64)):
        assert (found := curve.within(hours)) is not None and found.forecast.ranks == ranks
    assert curve.within(fast / 2) is None


def test_the_curve_is_drawn() -> None:
    curve = scaling_curve([1, 8, 64], _amdahl, total_tokens=2**40)
    assert len(list(ET.fromstring(svg(curve)).iter("{http://www.w3.org/2000/svg}circle"))) == 6
    ET.fromstring(svg(scaling_curve([8], _amdahl, total_tokens=2**40)))


@given(critical=st.floats(1e3, 1e9), reference=st.floats(1e3, 1e9))
def test_the_critical_batch_takes_twice_the_fewest_steps_and_tokens(critical: float, reference: float) -> None:
    batches = [StepForecast(ranks=8, step_s=1.0, tokens=max(1, round(critical * factor))) for factor in (1e-6, 1, 1e6)]
    told = batch_advice(critical, batches, reference_batch=reference, reference_tokens=1e12)
    by_batch = {choice.forecast.tokens: choice for choice in told.choices}
    small, equal, large = (by_batch[forecast.tokens] for forecast in batches)
    # A batch of whole tokens is a thousandth off at most.
    assert equal.steps == pytest.approx(2 * told.least_steps, rel=1e-3)
    assert equal.tokens == pytest.approx(2 * told.least_tokens, rel=1e-3)
    assert small.tokens == pytest.approx(told.least_tokens, rel=2e-3)
    assert large.steps == pytest.approx(told.least_steps, rel=1e-3)


@given(critical=st.floats(1e3, 1e9), batch=st.integers(1000, 10**9))
def test_the_reference_takes_its_own_tokens(critical: float, batch: int) -> None:
    told = batch_advice(
        critical, [StepForecast(ranks=8, step_s=2.0, tokens=batch)], reference_batch=batch, reference_tokens=1e12
    )
    assert told.fastest.tokens == pytest.approx(1e12)
    assert told.fastest.hours == pytest.approx(1e12 / batch * 2 / 3600)


def test_advice_names_the_fastest_and_the_cheapest_and_what_is_neither() -> None:
    # Twice the ranks take twice the batch in the same time; the last wastes its ranks.
    batches = [StepForecast(ranks=ranks, step_s=10, tokens=2**16 * ranks) for ranks in (8, 16, 64)]
    wasted = StepForecast(ranks=128, step_s=12, tokens=2**16 * 64)
    told = batch_advice(2**20, [*batches, wasted], reference_batch=2**20, reference_tokens=1e11)
    assert (told.fastest.forecast.ranks, told.cheapest.forecast.ranks) == (64, 8)
    assert [choice.forecast.ranks for choice in told.choices if not choice.on_front] == [128]
    assert "critical batch 1.049e+06 tokens" in str(told)
    assert str(told).count("another is faster and cheaper") == 1


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: StepForecast(ranks=0, step_s=1, tokens=1), "needs at least one rank and one token"),
        (lambda: scaling_curve([8], _amdahl, total_tokens=0), "total_tokens=0"),
        (lambda: scaling_curve([8], lambda ranks: None, total_tokens=1), "no strategy fits on any of 8 ranks"),
        (lambda: scaling_curve([8], lambda ranks: _amdahl(4), total_tokens=1), "of 8 ranks, and got one of 4"),
        (lambda: scaling_curve([8], _amdahl, total_tokens=1, goodput=lambda f: 1.5), "goodput of 8 ranks is 1.5"),
        (lambda: batch_advice(1e6, [], reference_batch=1, reference_tokens=1), "batch advice without forecasts"),
        (
            lambda: batch_advice(float("inf"), [_amdahl(8)], reference_batch=1, reference_tokens=1),
            "critical_tokens=inf: batch advice needs a number",
        ),
    ],
)
def test_odd_numbers_are_refused(make: object, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        make()  # type: ignore[operator]
