"""Seconds of inference (prefill, decode, log-probabilities): the forward half of a step's profile, and a decode step of it.

A decode step reads all weights and the KV cache for one token a row, so it is bound by the memory; its operators are those
of the traced forward with fewer rows, and attention is what it reads of the cache.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import fsum

from meshkit.cluster import Cluster, Op, kernel_s
from meshkit.preflight.forecast._price import FORWARD, Prices, data_exposed, hops_between, launch_s
from meshkit.preflight.forecast._profile import Call, Part, StepProfile

ITEMSIZE = {"float64": 8, "float32": 4}  # of others, 2
CACHE_COPIES = 3  # keys and values of a step: read from the pages, written in a row, and read by attention


def forward_seconds(profile: StepProfile, cluster: Cluster) -> float:
    """Of all microbatches of the step, forward alone: log-probabilities, values, prefill. A pure function.

    Stages of pp run one after the other on each microbatch, and beside each other on several.
    """
    prices = Prices(cluster, profile.spec)
    stages = [_stage_s(parts, profile.microbatches, prices) for parts in profile.stages]
    hop_s = _hop_s(profile, cluster, 1.0)
    each = [microbatch_s for microbatch_s, _ in stages]
    first_s = fsum(each) + hop_s
    once_s = max(once for _, once in stages)
    return first_s + (profile.microbatches - 1) * max(each) + once_s


def decode_seconds(
    profile: StepProfile, cluster: Cluster, *, rows: int, seq_len: int, context: float, cache_bytes: float
) -> float:
    """Of one decode step: a token for each of `rows` rows of a rank, whose cache holds `context` tokens each, on average.

    profile: of a step with microbatches of rows of seq_len tokens, in all `seq_len` of them. cache_bytes: of a token on a
    rank of tp, in all stages. Weights are read once; parameters of an FSDP unit are gathered already.
    """
    prices = Prices(cluster, profile.spec)
    share = rows / seq_len
    computed = fsum(_decode_stage_s(parts, share, rows, profile.dtype, prices) for parts in profile.stages)
    read = Op("memory", profile.dtype, 0.0, 0.0, 0, 0, 0, 1, CACHE_COPIES * rows * context * cache_bytes, FORWARD)
    return computed + kernel_s(cluster.device, read) + _hop_s(profile, cluster, share)


def gather_seconds(profile: StepProfile, cluster: Cluster) -> float:
    """Of gathering all parameters of a rank's stages once, as generation does before its first token."""
    prices = Prices(cluster, profile.spec)
    return max(
        fsum(
            prices.call_s(replace(call, count=1))
            for part in parts
            for call in dict.fromkeys(replace(call, count=1) for call in part.data)
            if call.op == "all_gather" and call.phase == FORWARD
        )
        for parts in profile.stages
    )


def _stage_s(parts: tuple[Part, ...], microbatches: int, prices: Prices) -> tuple[float, float]:
    """(of one microbatch, of what is sent once)."""
    priced = [prices.part(part) for part in parts]
    computed = [each.seconds(FORWARD) for each in priced]
    busy_s = fsum(computed)
    each_s = busy_s + launch_s(prices.cluster, sum(each.launches[FORWARD] for each in priced), busy_s)
    once_s = 0.0
    for times, exposed in data_exposed(parts, FORWARD, computed, microbatches, prices):
        if times == microbatches > 1:
            each_s += fsum(exposed.values())
        else:
            once_s += fsum(exposed.values())
    return each_s, once_s


def _decode_stage_s(parts: tuple[Part, ...], share: float, rows: int, dtype: str, prices: Prices) -> float:
    size = ITEMSIZE.get(dtype, 2)
    kernels = fsum(
        kernel_s(prices.cluster.device, _with_rows(op, share, rows, size)) * count
        for part in parts
        for op, count in part.profile.ops
        if op.phase == FORWARD and op.kind != "attention"
    )
    calls = fsum(prices.call_s(_smaller(call, share)) for part in parts for call in part.calls if call.phase == FORWARD)
    launches = sum(part.profile.launches.get(FORWARD, 0) for part in parts)
    launches += sum(call.count for part in parts for call in part.calls if call.phase == FORWARD)
    return kernels + calls + launch_s(prices.cluster, launches, kernels + calls)


def _with_rows(op: Op, share: float, rows: int, size: int) -> Op:
    """The operator on fewer tokens: the weights of a product are read whole."""
    if op.kind == "memory" or not op.work:
        return replace(op, bytes=op.bytes * share)
    weights = min(op.bytes, float(op.columns * op.depth * op.batch * size))
    return replace(
        op,
        rows=max(1, rows),
        flops=op.flops * share,
        work=op.work * share,
        bytes=weights + (op.bytes - weights) * share,
    )


def _smaller(call: Call, share: float) -> Call:
    return replace(call, size=max(1, round(call.size * share)))


def _hop_s(profile: StepProfile, cluster: Cluster, share: float) -> float:
    """Of the messages from the first stage to the last."""
    if profile.schedule is None:
        return 0.0
    smaller = replace(profile, crossing=tuple((round(a * share), 0) for a, _ in profile.crossing))
    # In inference a microbatch passes all stages, whatever it skips in training.
    neighbours = set(pairwise(profile.schedule.placement))
    hops = hops_between((way for way in neighbours if len(set(way)) > 1), smaller, cluster)
    return (len(profile.stages) - 1) * max(hops.values(), default=0.0)
