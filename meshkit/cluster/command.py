"""`python -m meshkit measure-cluster`: measures the machine that it is started on, and writes it as a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from meshkit.cluster.measure import write_measured


@dataclass(frozen=True, kw_only=True)
class MeasureCluster:
    """Measure kernels, and under torchrun collectives, for a minute, and write a cluster's file for `forecast --cluster`.

    torchrun --nproc-per-node 4 -m meshkit measure-cluster
    """

    out: Path = Path("cluster.toml")
    """the file"""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """what to measure"""
    unlike: bool = False
    """in place of collectives, how fast each node is, or each rank of one, and each link between two, for `place`"""


def measure_cluster(options: MeasureCluster) -> None:
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    cluster = write_measured(options.out, kind, unlike=options.unlike)
    if int(os.environ.get("RANK", "0")) == 0:
        device = cluster.device
        print(
            f"{device.name}: memory {device.memory_bytes_per_s / 1e9:.1f} GB/s, launch {device.launch_s * 1e6:.1f} us"
        )
        print("peaks: " + ", ".join(f"{dtype} {peak / 1e9:,.1f} GFLOP/s" for dtype, peak in device.flops_per_s.items()))
        for curve in cluster.collectives:
            size, seconds = curve.points[-1]
            print(
                f"{curve.op}: {curve.points[0][1] * 1e6:.0f} us at least, {size / seconds / 1e9:.2f} GB/s, {size:,.0f} bytes"
            )
        if cluster.unlike is not None:
            print("speeds: " + ", ".join(f"{speed:g}" for speed in cluster.unlike.speed))
            for block, (rates, hops) in enumerate(
                zip(cluster.unlike.bytes_per_s, cluster.unlike.latency_s, strict=True)
            ):
                links = [f"{rate / 1e6:,.3g} MB/s {hop * 1e6:,.3g} us" for rate, hop in zip(rates, hops, strict=True)]
                print(f"from {block}: " + ", ".join("itself" if at == block else text for at, text in enumerate(links)))
        print(f"wrote {options.out}")
