"""Calibration from a run: a cluster that computes and sends as fast as one measured step did."""

from __future__ import annotations

from dataclasses import replace
from math import fsum

from meshkit.cluster import Cluster
from meshkit.errors import ClusterError
from meshkit.preflight.forecast._beside import COMPUTING, MeasuredStep, Told

LEAST = 0.02  # of a step: messages that take less than that of it say nothing of the links


def calibrated(cluster: Cluster, told: Told, measured: MeasuredStep) -> Cluster:
    """The cluster with all kernels, and all messages, slower by one factor each: those of the step then take what they took.

    told: the forecast of that step on the cluster, measured: what it was. Peaks stay, so MFU keeps its meaning.
    Raises: ClusterError for a step of which only the seconds are known, as on CUDA.
    """
    if not measured.by_axis:
        raise ClusterError(
            "calibrated: of this step nobody knows what it waited for, on CUDA the host does not see it. Use measure-cluster."
        )
    kernels = measured.by_axis[COMPUTING] / told.by_axis[COMPUTING]
    sent, waited = (fsum(by.values()) - by[COMPUTING] for by in (told.by_axis, measured.by_axis))
    messages = waited / sent if sent > LEAST * told.seconds and waited > 0 else 1.0
    device = cluster.device
    efficiency = replace(
        device.efficiency,
        matmul=min(1.0, device.efficiency.matmul / kernels),
        attention=min(1.0, device.efficiency.attention / kernels),
    )
    curves = tuple(
        replace(curve, points=tuple((m, n, k, seconds * kernels) for m, n, k, seconds in curve.points))
        for curve in device.curves
    )
    return replace(
        cluster,
        device=replace(
            device,
            memory_bytes_per_s=device.memory_bytes_per_s / kernels,
            launch_s=device.launch_s * kernels,
            efficiency=efficiency,
            curves=curves,
            memory_curve=tuple((size, seconds * kernels) for size, seconds in device.memory_curve),
        ),
        tiers=tuple(
            replace(tier, bytes_per_s=tier.bytes_per_s / messages, latency_s=tier.latency_s * messages)
            for tier in cluster.tiers
        ),
        collectives=tuple(
            replace(curve, points=tuple((size, seconds * messages) for size, seconds in curve.points))
            for curve in cluster.collectives
        ),
        level="traced",
        source=f"{cluster.source}; one step of a run: kernels {kernels:.2f} times as long, messages {messages:.2f}",
    )
