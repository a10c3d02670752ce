"""The step model: closed forms, published bubbles, and a ledger that sums to the total."""

from __future__ import annotations

import time
from dataclasses import replace
from math import fsum, log, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.cluster import Cluster, Device, Efficiency, Faults, Host, Op, Overlap, Tier
from meshkit.mesh import MeshSpec
from meshkit.parallel.pipeline.schedules import one_f_one_b, zb_h1
from meshkit.preflight.forecast import Call, Part, Profile, StepProfile, price
from meshkit.preflight.forecast._price import StageSeconds, exposed_s, pipeline_seconds
from tests.parallel.pipeline.test_simulate import PUBLISHED

TOL_SUM = 1e-12  # only the order of summation differs

PLAIN = Efficiency(matmul=1.0, attention=1.0, attention_backward=1.0, memory=1.0, half_features=0, half_depth=0)
MACHINE = Cluster(
    name="c",
    device=Device(
        name="d",
        memory_bytes=1e12,
        memory_bytes_per_s=1e9,
        flops_per_s={"bfloat16": 1e12},
        launch_s=0.0,
        efficiency=PLAIN,
    ),
    tiers=(Tier(name="node", ranks=64, bytes_per_s=1e9, latency_s=0.0),),
    overlap=Overlap(compute_slower=1.0, collective_slower=1.0),
)


def product(seconds: float, phase: str) -> Op:
    flops = seconds * 1e12
    return Op("matmul", "bfloat16", flops, flops, 1, 1, 1, 1, 0.0, phase)


def part(name: str, forward: float, backward: float, weight: float = 0.0, **fields: object) -> Part:
    ops = [(product(forward, "forward"), 1), (product(backward, "backward"), 1), (product(weight, "weight"), 1)]
    return Part(name=name, profile=Profile(ops=tuple(ops), launches={}), **fields)  # type: ignore[arg-type]


def step(spec: str, *stages: tuple[Part, ...], microbatches: int = 1, **fields: object) -> StepProfile:
    chosen = {"schedule": None, "crossing": (), "once": (), **fields}
    return StepProfile(
        spec=MeshSpec.parse(spec),
        microbatches=microbatches,
        tokens=1,
        flops=1.0,
        dtype="bfloat16",
        stages=stages,
        **chosen,
    )  # type: ignore[arg-type]


def test_one_rank_computes_its_parts_for_every_microbatch() -> None:
    priced = price(step("dp_shard=1", (part("a", 1.0, 2.0, 0.5), part("b", 3.0, 4.0)), microbatches=3), MACHINE)
    assert priced.seconds == pytest.approx(3 * 10.5)
    assert priced.ledger == pytest.approx({"matmul": 31.5})


def test_messages_of_tensor_parallelism_block() -> None:
    call = Call("tp", "all_gather", 10**9, "forward", 2)
    priced = price(step("tp=2", (part("a", 1.0, 2.0, calls=(call,)),)), MACHINE)
    assert priced.ledger == pytest.approx({"matmul": 3.0, "tp": 2 * 0.5})


def test_a_ring_goes_on_beside_attention() -> None:
    attention = Op("attention", "bfloat16", 0.0, 0.4e12, 1, 1, 64, 1, 0.0, "forward")
    profile = Profile(ops=((attention, 1),), launches={})
    call = Call("cp", "send", 10**9, "forward", 1)
    priced = price(step("cp=2", (Part(name="a", profile=profile, calls=(call,)),)), MACHINE)
    assert priced.ledger == pytest.approx({"attention": 0.4, "cp": 0.6})


GATHER = Call("dp_shard", "all_gather", 2 * 10**9, "forward", 1)  # a second on two ranks
AGAIN = replace(GATHER, phase="backward")
REDUCE = Call("dp_shard", "reduce_scatter", 2 * 10**9, "backward", 1)


def test_fsdp_gathers_one_unit_ahead_and_reduces_one_behind() -> None:
    """AG_0 + sum max(0, AG_i+1 - F_i), and sum max(0, AG_i-1 + RS_i+1 - B_i) + RS_0."""
    units = tuple(
        part(str(at), f, b, data=(GATHER, AGAIN, REDUCE))
        for at, (f, b) in enumerate([(0.3, 3.0), (2.0, 0.7), (5, 1.5)])
    )
    priced = price(step("dp_shard=2", units), MACHINE)
    forward = 1.0 + (1.0 - 0.3) + 0.0
    # Backward runs 2, 1, 0: the gather of 2 is alone; beside 2 that of 1; beside 1 that of 0 and the reduction of 2; ...
    backward = 1.0 + 0.0 + (2.0 - 0.7) + 0.0 + 1.0
    assert priced.ledger["dp_shard"] == pytest.approx(forward + backward)


def test_what_is_sent_once_does_not_hide_behind_what_is_hidden_behind_already() -> None:
    """Two microbatches: the gradients of a unit are reduced in each, 3 s, and over replicas in the last, 2 s."""
    data = (
        Call("dp_shard", "reduce_scatter", int(4e9), "backward", 2),
        Call("dp_inter", "send", int(2e9), "backward", 1),
    )
    first, second = part("a", 0.0, 4.0), part("b", 0.0, 1.0, data=data)
    told = price(step("dp_shard=4x1", (first, second), microbatches=2), MACHINE)
    # Backward of b, then of a beside what b sends: 3 of 4 s, and in the last microbatch 5.
    assert told.seconds == pytest.approx((1 + 4) + (1 + 5))


@given(st.floats(0, 10), st.floats(0, 10), st.floats(1, 3), st.floats(1, 3))
def test_contention_costs_something_and_never_more_than_one_after_the_other_slowed(
    compute: float, message: float, slower: float, message_slower: float
) -> None:
    shown = exposed_s(compute, message, slower, message_slower)
    assert max(0.0, message - compute) - 1e-9 <= shown
    assert compute + shown <= max(compute * slower, message * message_slower) + max(compute, message) + 1e-9
    assert exposed_s(compute, message, 1.0, 1.0) == pytest.approx(max(0.0, message - compute), abs=1e-12)


def test_without_overlap_both_slow_to_a_halt_of_the_other() -> None:
    """On a CPU what runs at the same time shares the cores: two at half speed are one after the other."""
    assert exposed_s(3.0, 1.0, 2.0, 2.0) == pytest.approx(1.0)
    assert exposed_s(1.0, 3.0, 2.0, 2.0) == pytest.approx(3.0)


@pytest.mark.parametrize(("p", "m", "f", "i", "w", "hop", "of_1f1b", "of_zb_h1"), PUBLISHED)
def test_bubbles_of_a_priced_pipeline_are_the_published_ones(
    p: int, m: int, f: float, i: float, w: float, hop: float, of_1f1b: float, of_zb_h1: float
) -> None:
    stage = StageSeconds({"forward": {"matmul": f}, "backward": {"matmul": i}, "weight": {"matmul": w}}, {})
    for schedule, rate in ((one_f_one_b(p, m), of_1f1b), (zb_h1(p, m), of_zb_h1)):
        assert round(pipeline_seconds(schedule, [stage] * p, hop).bubble_rate, 4) == rate


@pytest.mark.parametrize(("p", "m", "f", "i", "w", "hop", "of_1f1b", "of_zb_h1"), PUBLISHED)
def test_a_forecast_has_the_published_step(
    p: int, m: int, f: float, i: float, w: float, hop: float, of_1f1b: float, of_zb_h1: float
) -> None:
    """Through `price`: equal stages whose hops take as long as the paper's, in ms."""
    machine = replace(MACHINE, tiers=(replace(MACHINE.tiers[0], latency_s=hop, bytes_per_s=1e30),))
    stages = tuple((part("a", f, i, w),) for _ in range(p))
    for schedule, rate in ((one_f_one_b(p, m), of_1f1b), (zb_h1(p, m), of_zb_h1)):
        profile = step(f"pp={p}", *stages, microbatches=m, schedule=schedule, crossing=((1, 1),) * (p - 1))
        priced = price(profile, machine)
        assert round(1 - m * (f + i + w) / priced.seconds, 4) == rate
        assert priced.ledger["pp"] > 0 and priced.ledger["bubble"] > 0
        assert fsum(priced.ledger.values()) == pytest.approx(priced.seconds, rel=TOL_SUM)


def test_ends_of_the_step_wait_for_the_slowest_stage() -> None:
    first, last = part("a", 1.0, 1.0, 1.0, trained=10**6), part("b", 1.0, 1.0, 1.0, trained=3 * 10**6)
    profile = step("pp=2", (first,), (last,), microbatches=2, schedule=one_f_one_b(2, 2), crossing=((0, 0),))
    assert price(profile, MACHINE).ledger["optimizer"] == pytest.approx(3e6 * 40 / 1e9)


def test_launches_are_seen_where_the_host_is_slower_than_the_device() -> None:
    profile = Profile(ops=((product(1.0, "forward"), 1),), launches={"forward": 1000})
    parts = (Part(name="a", profile=profile),)
    both = 2 ** (1 / 3) - 1  # alike, neither is ahead
    for launch, kernels, seen in ((1e-6, "cuda", 0.0), (1e-3, "cuda", both), (1.0, "cuda", 999.0), (1e-4, "cpu", 0.1)):
        machine = replace(MACHINE, device=replace(MACHINE.device, launch_s=launch, kernels=kernels))
        assert price(step("dp_shard=1", parts), machine).ledger.get("launch", 0.0) == pytest.approx(seen, abs=1e-6)
    blocking = replace(MACHINE, device=replace(MACHINE.device, launch_s=1e-4, blocking=True))
    assert price(step("dp_shard=1", parts), blocking).ledger["launch"] == pytest.approx(0.1)


def test_jitter_is_that_of_the_slowest_of_all_ranks() -> None:
    machine = replace(MACHINE, faults=Faults(jitter=0.01))
    profile = step("dp_shard=64", (part("a", 1.0, 2.0),))
    assert price(profile, machine).ledger["jitter"] == pytest.approx(3.0 * 0.01 * sqrt(2 * log(64)))


@given(st.integers(1, 4), st.integers(1, 6), st.floats(0.1, 3), st.floats(0.1, 3))
def test_the_ledger_sums_to_the_seconds(ranks: int, microbatches: int, forward: float, backward: float) -> None:
    stages = tuple((part("a", forward, backward, 0.3, data=(GATHER, REDUCE), trained=10**6),) for _ in range(ranks))
    schedule = one_f_one_b(ranks, microbatches) if ranks > 1 else None
    profile = step(
        f"pp={ranks} dp_shard=2",
        *stages,
        microbatches=microbatches,
        schedule=schedule,
        crossing=((10**6, 10**6),) * (ranks - 1),
    )
    priced = price(profile, replace(MACHINE, faults=Faults(jitter=0.02)))
    assert fsum(priced.ledger.values()) == pytest.approx(priced.seconds, rel=TOL_SUM)
    assert price(profile, replace(MACHINE, faults=Faults(jitter=0.02))).ledger == priced.ledger


@pytest.mark.alone
def test_a_profile_of_64_microbatches_is_priced_in_10_ms() -> None:
    blocks = tuple(part(f"layers.{index}", 1.0, 1.0, 1.0, data=(GATHER, REDUCE)) for index in range(20))
    profile = step(
        "pp=4 dp_shard=2", *(blocks,) * 4, microbatches=64, schedule=one_f_one_b(4, 64), crossing=((1, 1),) * 3
    )
    best = min(_took(profile) for _ in range(5))
    assert best < 0.010


def _took(profile: StepProfile) -> float:
    began = time.perf_counter()
    price(profile, MACHINE)
    return time.perf_counter() - began


def test_ranks_that_share_the_cores_of_a_host() -> None:
    """Four ranks on two cores: a rank computes twice as fast while two wait, and all together as fast as the cores do."""
    shared = replace(MACHINE, tiers=(replace(MACHINE.tiers[0], ranks=4),), host=Host(cores=2.0))
    alone = replace(shared, host=Host())
    stage = (part("block", 1.0, 2.0),)
    for microbatches in (1, 64):
        table = one_f_one_b(4, microbatches)
        profile = step("pp=4", *(stage,) * 4, schedule=table, crossing=((0, 0),) * 3, microbatches=microbatches)
        found = price(profile, shared)
        path_s, busy_s = price(profile, alone).seconds / 2, 3.0 * microbatches
        assert found.seconds == pytest.approx(max(path_s, busy_s))
        assert fsum(found.ledger.values()) == pytest.approx(found.seconds)
    whole = step("dp_replicate=4", stage)
    assert price(whole, shared).seconds == price(whole, alone).seconds  # measured while all four compute
