"""Seconds of kernels: the roofline by hand, and measured shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshkit.cluster import Device, Efficiency, KernelCurve, Op, kernel_s
from meshkit.errors import ClusterError

PLAIN = Efficiency(matmul=1.0, attention=0.5, attention_backward=0.5, memory=1.0, half_features=0, half_depth=0)
DEVICE = Device(name="d", memory_bytes=1, memory_bytes_per_s=1e9, flops_per_s={"bfloat16": 1e12}, efficiency=PLAIN)


def product(m: int, n: int, k: int, size: float = 0.0) -> Op:
    return Op("matmul", "bfloat16", 2.0 * m * n * k, 2.0 * m * n * k, m, n, k, 1, size, "forward")


def test_the_slower_of_flops_and_bytes() -> None:
    assert kernel_s(DEVICE, product(100, 100, 100)) == pytest.approx(2e6 / 1e12)
    assert kernel_s(DEVICE, product(100, 100, 100, 1e6)) == pytest.approx(1e-3)


def test_small_dims_reach_less() -> None:
    device = replace(DEVICE, efficiency=replace(PLAIN, half_features=100, half_depth=300))
    assert kernel_s(device, product(100, 100, 100)) == pytest.approx(2e6 / 1e12 * 2 * 2 * 4)


def test_features_that_are_no_multiple_of_16_bytes_reach_less() -> None:
    device = replace(DEVICE, efficiency=replace(PLAIN, half_unaligned=108))
    aligned, unaligned = product(64, 64, 112), product(64, 64, 108)
    assert kernel_s(device, aligned) == pytest.approx(aligned.flops / 1e12)
    assert kernel_s(device, unaligned) == pytest.approx(2 * unaligned.flops / 1e12)
    # Tokens are no features: they may be any number. Of fp32 four are 16 bytes.
    assert kernel_s(device, product(108, 64, 64)) == pytest.approx(2 * 108 * 64 * 64 / 1e12)
    assert kernel_s(device, replace(unaligned, phase="weight")) == pytest.approx(unaligned.flops / 1e12)
    single = replace(device, flops_per_s={"float32": 1e12})
    assert kernel_s(single, replace(unaligned, dtype="float32")) == pytest.approx(unaligned.flops / 1e12)


def test_attention_has_a_share_of_its_own_and_executes_its_work() -> None:
    op = Op("attention", "bfloat16", 4e9, 2e9, 10, 10, 64, 1, 0.0, "forward")
    assert kernel_s(DEVICE, op) == pytest.approx(2e9 / 0.5e12)
    assert kernel_s(DEVICE, replace(op, phase="backward")) == pytest.approx(2e9 / 0.25e12)


def test_a_small_kernel_of_the_memory_gets_a_part_of_the_bandwidth() -> None:
    device = replace(DEVICE, efficiency=replace(PLAIN, half_bytes=1e6))
    assert kernel_s(device, Op("memory", "bfloat16", 0, 0, 0, 0, 0, 1, 1e6, "forward")) == pytest.approx(2e-3)


def test_a_measured_shape_has_its_measured_seconds() -> None:
    curve = KernelCurve(dtype="bfloat16", points=((100, 100, 100, 1e-5), (1000, 1000, 1000, 1e-2)))
    device = replace(DEVICE, curves=(curve,))
    assert kernel_s(device, product(100, 100, 100)) == pytest.approx(1e-5, rel=1e-3)
    between = kernel_s(device, product(300, 300, 300))
    assert 2 * 300**3 / (2 * 100**3 / 1e-5) * 0.3 < between < 2 * 300**3 / (2 * 1000**3 / 1e-2) * 3


def test_a_measured_curve_of_the_memory_wins() -> None:
    device = replace(DEVICE, memory_curve=((1e3, 1e-6), (1e5, 3e-4)))

    def seconds(size: float) -> float:
        return kernel_s(device, Op("memory", "", 0.0, 0.0, 0, 0, 0, 1, size, "forward"))

    assert seconds(0.0) == 0.0
    assert seconds(500.0) == pytest.approx(5e-7)
    assert seconds(1e3) == pytest.approx(1e-6)
    assert seconds(5.05e4) == pytest.approx(1.505e-4)
    assert seconds(1e6) == pytest.approx(3e-3)
    with pytest.raises(ClusterError, match="memory_curve"):
        replace(DEVICE, memory_curve=((1e3, 1e-6), (1e3, 2e-6)))
