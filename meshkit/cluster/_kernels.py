"""Seconds of a kernel (roofline with shape efficiency): the slower of its FLOPs and its bytes, each at its size's rate."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import log

from meshkit.cluster._device import Device, KernelCurve


@dataclass(frozen=True)
class Op:
    """One operator of a program, without a device.

    kind: matmul, attention or memory. dtype: what it multiplies in, as "bfloat16". flops: as papers count them, attention's
    whole square. work: those that the kernel executes, of causal attention about half. rows, columns, depth: of a product; of
    attention the queries, keys and features of a head. batch: of how many equal products it is. bytes: read and written.
    phase: forward, recompute, backward (of inputs) or weight (backward of weights).
    """

    kind: str
    dtype: str
    flops: float
    work: float
    rows: int
    columns: int
    depth: int
    batch: int
    bytes: float
    phase: str


def kernel_s(device: Device, op: Op) -> float:
    """Seconds on the device, without the launch."""
    efficiency, memory_s = device.efficiency, _memory_s(device, op.bytes)
    if op.kind == "memory" or not op.work:
        return memory_s
    peak = device.peak_flops_per_s(op.dtype)
    if op.kind == "attention":
        share = efficiency.attention * op.depth / (op.depth + efficiency.half_head)
        share *= efficiency.attention_backward if op.phase == "backward" else 1.0
        return max(memory_s, op.work / (peak * share))
    curve = next((curve for curve in device.curves if curve.dtype == op.dtype), None)
    if curve is not None:
        return max(memory_s, op.work / _measured_flops_per_s(curve, op))
    share = efficiency.matmul
    # Tokens may be any number: they are no dim that lies in memory last.
    tokens = "depth" if op.phase == "weight" else "rows"
    for name, half in (
        ("rows", efficiency.half_features),
        ("columns", efficiency.half_features),
        ("depth", efficiency.half_depth),
    ):
        size = getattr(op, name)
        if name != tokens and size * _itemsize(op.dtype) % 16:
            half += efficiency.half_unaligned
        share *= size / (size + half)
    return max(memory_s, op.work / (peak * share))


def _itemsize(dtype: str) -> int:
    return next((size for name, size in (("float8", 1), ("float32", 4), ("float64", 8)) if dtype.startswith(name)), 2)


def _memory_s(device: Device, size: float) -> float:
    """Of reading and writing so many bytes: as measured, between sizes in proportion, beyond at the rate of the last."""
    if not size:
        return 0.0
    curve = device.memory_curve
    if not curve:
        return (size + device.efficiency.half_bytes) / (device.memory_bytes_per_s * device.efficiency.memory)
    at = bisect_left(curve, (size, 0.0))
    if at in (0, len(curve)):
        known, seconds = curve[min(at, len(curve) - 1)]
        return seconds * size / known
    (less, less_s), (more, more_s) = curve[at - 1], curve[at]
    return less_s + (more_s - less_s) * (size - less) / (more - less)


NEAREST = 4  # measured shapes that tell another's rate


def _measured_flops_per_s(curve: KernelCurve, op: Op) -> float:
    """Of the nearest measured shapes, by the distance of the logarithms of their sizes."""
    sizes = (max(1, op.rows), max(1, op.columns), max(1, op.depth))
    near = sorted(
        (
            sum((log(size) - log(measured)) ** 2 for size, measured in zip(sizes, point[:3], strict=True)),
            2 * point[0] * point[1] * point[2] / point[3],
        )
        for point in curve.points
    )[:NEAREST]
    weights = [1 / (distance + 1e-6) for distance, _ in near]
    return sum(weight * rate for weight, (_, rate) in zip(weights, near, strict=True)) / sum(weights)
