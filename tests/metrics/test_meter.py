import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshkit.errors import MeshkitError
from meshkit.metrics import FlopsPerToken, Meter, peak_memory

ROOT = Path(__file__).parents[2]


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_step_lasts_from_the_previous_one_and_the_mean_leaves_warm_up_out(clock):
    meter = Meter(total_steps=6, warmup_steps=2, clock=clock)
    readings = []
    for seconds, tokens in [(50, 100), (30, 100), (1, 100), (2, 300), (3, 200)]:
        clock.now_s += seconds
        readings.append(meter.step(tokens))
    assert [reading.last.step_s for reading in readings] == [50, 30, 1, 2, 3]
    assert [reading.mean.step_s for reading in readings] == [50, 30, 1, 1.5, 2]
    assert [reading.left_s for reading in readings] == [250, 120, 3, 3, 2]
    assert readings[-1].last.tokens_per_s == pytest.approx(200 / 3)
    assert readings[-1].mean.tokens_per_s == 600 / 6  # of the sums, not the mean of the quotients


def test_a_continued_run_has_the_time_of_the_remaining_steps_left(clock):
    meter = Meter(total_steps=100, start_step=90, warmup_steps=0, clock=clock)
    clock.now_s += 4
    assert meter.step(1).left_s == 9 * 4


def test_pauses_are_no_part_of_a_step_even_nested_or_ended_by_an_error(clock):
    meter = Meter(total_steps=2, warmup_steps=0, clock=clock)
    clock.now_s += 1
    with meter.paused():
        clock.now_s += 100
        with meter.paused():
            clock.now_s += 1000
    with pytest.raises(RuntimeError), meter.paused():
        clock.now_s += 10_000
        raise RuntimeError("validation failed")
    clock.now_s += 2
    assert meter.step(30).last.step_s == 3
    clock.now_s += 5
    assert meter.step(30).last.step_s == 5


def test_mfu_is_flops_done_over_flops_possible_on_all_devices(clock):
    meter = Meter(total_steps=9, warmup_steps=0, devices=4, peak_flops_per_s=1000.0, clock=clock)
    reading = meter.step(200, flops_per_token=FlopsPerToken(full=8.0, causal=6.0), seconds=0.5)
    assert reading.last.mfu_full == pytest.approx(200 * 8 / 0.5 / 4000)
    assert reading.last.mfu_causal == pytest.approx(200 * 6 / 0.5 / 4000)
    reading = meter.step(200, flops_per_token=FlopsPerToken(full=4.0, causal=3.0), seconds=1.5)  # shorter documents
    assert reading.mean.mfu_full == pytest.approx((1600 + 800) / 2 / 4000)


@pytest.mark.parametrize("peak, flops", [(None, FlopsPerToken(full=8.0, causal=6.0)), (1e15, None)])
def test_no_mfu_is_reported_when_the_peak_or_the_flops_are_unknown(clock, peak, flops):
    meter = Meter(total_steps=9, peak_flops_per_s=peak, clock=clock)
    reading = meter.step(200, flops_per_token=flops, seconds=0.5)
    assert reading.last.mfu_full is None and reading.mean.mfu_causal is None
    assert reading.scalars().keys() == {"step_s", "tokens_per_s", "left_s", "peak_rss_bytes"}


def test_scalars_are_finite_numbers_with_units_in_their_names(clock):
    meter = Meter(total_steps=9, peak_flops_per_s=1e15, clock=clock)
    scalars = meter.step(200, flops_per_token=FlopsPerToken(full=8.0, causal=6.0)).scalars()  # the clock stands still
    assert scalars.keys() == {"step_s", "tokens_per_s", "mfu_full", "mfu_causal", "left_s", "peak_rss_bytes"}
    assert all(math.isfinite(value) for value in scalars.values())


def test_the_clock_is_real_when_none_is_given():
    meter = Meter(total_steps=2, warmup_steps=0)
    assert 0 < meter.step(1).last.step_s < 60


def test_a_step_inside_a_pause_and_a_step_without_time_are_refused(clock):
    meter = Meter(total_steps=2, clock=clock)
    with meter.paused(), pytest.raises(MeshkitError, match=r"Meter.step\(\) inside paused\(\)"):
        meter.step(1)
    with pytest.raises(MeshkitError, match="seconds=0: a step takes a positive time"):
        meter.step(1, seconds=0)


def test_peak_memory_is_that_of_this_process_and_not_of_its_launcher():
    held = bytearray(b"\1") * (500 * 2**20)
    own_bytes = peak_memory(torch.device("cpu"))["peak_rss_bytes"]
    assert own_bytes > len(held)
    code = "import torch, meshkit.metrics as m; print(m.peak_memory(torch.device('cpu'))['peak_rss_bytes'])"
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert 2**20 < int(child.stdout) < own_bytes - len(held) // 2
