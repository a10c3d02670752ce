"""A cluster calibrated by a step: its forecast of that step is what was measured, and others go with it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshkit as mk
from meshkit.cluster import Cluster, Measured
from meshkit.errors import ClusterError
from meshkit.preflight.forecast import Batch, Forecast, MeasuredStep, calibrated, forecast
from tests.tiny import TINY

CPU = Cluster.read("cpu")
CURVES = replace(
    CPU, collectives=(Measured(op="all_reduce", tier="loopback", ranks=2, points=((1e3, 1e-3), (1e6, 2e-3))),)
)


@cache
def told_on(cluster: Cluster) -> Forecast:
    with torch.device("meta"):
        model = mk.models.Llama(TINY)
    strategy = mk.Strategy(mesh="tp=2", plan=mk.models.LLAMA_PLAN)
    return forecast(model, strategy, cluster, Batch(sequences=2, seq_len=16))


@given(st.sampled_from([CPU, CURVES]), st.floats(1.0, 50.0), st.floats(0.2, 50.0))
def test_the_step_takes_what_it_took(on: Cluster, kernels: float, messages: float) -> None:
    before = told_on(on)
    factors = {axis: kernels if axis == "computing" else messages for axis in before.told.by_axis}
    by_axis = {axis: seconds * factors[axis] for axis, seconds in before.told.by_axis.items()}
    measured = MeasuredStep(seconds=sum(by_axis.values()), by_axis=by_axis)
    cluster = calibrated(before.cluster, before.told, measured)
    after = before.on(cluster)
    assert after.seconds == pytest.approx(measured.seconds)
    assert after.told.by_axis == pytest.approx(by_axis)
    assert cluster.level == "traced"
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert cluster.device.flops_per_s == before.cluster.device.flops_per_s


def test_seconds_alone_do_not_calibrate() -> None:
    with pytest.raises(ClusterError, match="nobody knows what it waited for"):
        calibrated(CPU, told_on(CPU).told, MeasuredStep(seconds=1.0))
