"""Copies of activation offload in time: what a stage waits for until its activations have left, or are back.

A stream each way, beside the kernels: a block's activations leave while the next one computes, and the block after that waits
for them; they come back while the blocks `ahead` of it in backward compute. Copy engines take nothing from kernels, so unlike
messages they slow nothing down.
Source: Rhu et al. 2016 (vDNN), Wu et al. 2024 (SSDTrain).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshkit.cluster import Cluster
from meshkit.memory.offload import BLOCKS_LEAVING
from meshkit.mesh import MeshSpec
from meshkit.strategy import ActivationOffload


def copy_bytes_per_s(policy: ActivationOffload, cluster: Cluster, spec: MeshSpec) -> float:
    """Of a rank, one way: of its link to the host, or, where that is slower, of its share of a node's disk."""
    host = cluster.host
    if policy.to == "host" or not host.disk_bytes_per_s:
        return host.bytes_per_s
    ranks = min(cluster.tiers[0].ranks, spec.world_size)
    return min(host.bytes_per_s, host.disk_bytes_per_s / ranks)


def leaving_exposed_s(computed: Sequence[float], copies: Sequence[float]) -> float:
    """Seconds that the forward of blocks waits. computed, copies: of each, in order; a copy of nothing takes 0 s."""
    now = waited = link = 0.0
    ends = [0.0] * len(copies)
    for at, (compute_s, copy_s) in enumerate(zip(computed, copies, strict=True)):
        if at >= BLOCKS_LEAVING and ends[at - BLOCKS_LEAVING] > now:
            waited += ends[at - BLOCKS_LEAVING] - now
            now = ends[at - BLOCKS_LEAVING]
        now += compute_s
        if copy_s:
            link = max(link, now) + copy_s
        ends[at] = link
    return waited


def coming_exposed_s(computed: Sequence[float], copies: Sequence[float], ahead: int) -> float:
    """Seconds that the backward of blocks waits, from the last to the first; each begins when all of its own is back."""
    now = waited = link = 0.0
    ends: dict[int, float] = {}
    for at in reversed(range(len(copies))):
        for other in range(at, max(-1, at - ahead - 1), -1):
            if other not in ends:
                if copies[other]:
                    link = max(link, now) + copies[other]
                ends[other] = link if copies[other] else 0.0
        if ends[at] > now:
            waited += ends[at] - now
            now = ends[at]
        now += computed[at]
    return waited
