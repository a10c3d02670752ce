"""What is seen of copies of offloaded activations, by hand. A CPU has no link to a host, so there is nothing to measure."""

from __future__ import annotations

from dataclasses import replace
from math import fsum

import pytest
import torch

import meshkit as mk
from meshkit.cluster import Cluster, Host
from meshkit.parallel.pipeline.schedules import one_f_one_b, zb_h1
from meshkit.preflight.forecast import Part, Profile, StepProfile, price
from meshkit.preflight.forecast._copies import coming_exposed_s, leaving_exposed_s
from meshkit.strategy import ActivationOffload, BlockOverride, MemoryPolicy, Strategy
from tests.preflight.forecast.test_price import MACHINE, product, step
from tests.tiny import tiny_config

LINK = replace(MACHINE, host=Host(bytes_per_s=1e9))
SIZES = tiny_config(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_key_value_heads=2)


def block(name: str, forward: float, backward: float, moved: float, weight: float = 0.0) -> Part:
    """Seconds of kernels, and of a copy each way on LINK."""
    ops = [(product(forward, "forward"), 1), (product(backward, "backward"), 1), (product(weight, "weight"), 1)]
    profile = Profile(ops=tuple(ops), launches={}, moved_bytes=int(moved * 1e9))
    return Part(name=name, profile=profile, is_block=True)


def blocks(count: int, forward: float, backward: float, moved: float, *, kept: int = 1) -> tuple[Part, ...]:
    return tuple(block(str(at), forward, backward, moved if at < count - kept else 0.0) for at in range(count))


def profile(stage: tuple[Part, ...], **policy: object) -> StepProfile:
    return step("dp_shard=1", stage, offload=ActivationOffload(**policy))  # type: ignore[arg-type]


@pytest.mark.parametrize("copy", [0.5, 1.0, 1.7, 2.0, 3.5])
def test_of_a_uniform_model_each_block_shows_what_its_copy_takes_longer(copy: float) -> None:
    """n blocks that move, and one that stays. In forward the last of them has until the next forward to leave."""
    priced = price(profile(blocks(6, 1.0, 2.0, copy)), LINK)
    shown = 4 * max(0.0, copy - 1.0) + 5 * max(0.0, copy - 2.0)
    assert priced.ledger.get("offload", 0.0) == pytest.approx(shown)
    assert priced.seconds == pytest.approx(6 * 3.0 + shown) == pytest.approx(fsum(priced.ledger.values()))


def test_unlike_blocks_by_hand() -> None:
    # Leaving: 0 from 1 to 5, so that block 2, ready at 3, begins at 5; it leaves from 6 to 7, block 1 before from 5 to 6.
    assert leaving_exposed_s([1, 2, 1, 1], [4, 1, 1, 0]) == 2
    # Coming: block 2 while 3 computes, from 0 to 4 beside 2 s; then 1 beside it, 0.5 s of 3; then 0 beside 1.
    assert coming_exposed_s([1, 1, 3, 2], [2, 0.5, 4, 0], 1) == (4 - 2) + 0 + (2 - 1)


def test_a_block_that_stays_between_others_hides_copies() -> None:
    assert leaving_exposed_s([1, 1, 1, 1], [2, 2, 0, 0]) == pytest.approx(1 + 1)
    assert leaving_exposed_s([1, 1, 1, 1], [2, 0, 2, 0]) == pytest.approx(1)


@pytest.mark.parametrize(("ahead", "shown"), [(0, 5 * 1.5), (1, 0.0), (2, 0.0)])
def test_what_comes_back_no_block_ahead_is_waited_for_whole(ahead: int, shown: float) -> None:
    priced = price(profile(blocks(6, 2.0, 2.0, 1.5), ahead=ahead), LINK)
    assert priced.ledger.get("offload", 0.0) == pytest.approx(shown)


def test_without_a_block_that_stays_the_first_to_come_back_is_waited_for() -> None:
    priced = price(profile(blocks(4, 2.0, 2.0, 1.5, kept=0), keep_last=0), LINK)
    assert priced.ledger["offload"] == pytest.approx(1.5)


def test_every_microbatch_waits() -> None:
    one, four = (price(replace(profile(blocks(6, 1.0, 2.0, 3.0)), microbatches=count), LINK) for count in (1, 4))
    assert four.ledger["offload"] == pytest.approx(4 * one.ledger["offload"])


def test_stages_wait_in_their_own_rows_and_the_ledger_sums() -> None:
    """Two stages alike but for the block that stays: the bubble is that of their seconds with what they wait."""
    first, second = blocks(3, 1.0, 2.0, 3.0, kept=0), blocks(3, 1.0, 2.0, 3.0)
    told = price(staged(first, second, one_f_one_b), LINK)
    assert told.seconds == pytest.approx(fsum(told.ledger.values()))
    # Of the first stage: forward 3 + (3 - 1), backward 6 + 3 + 2 (3 - 2); of the second: 3 + 2, 6 + 2 (3 - 2).
    longest = 4 * (5 + 11)
    assert told.ledger["offload"] == pytest.approx(4 * (2 + 5))
    assert fsum(told.ledger[name] for name in ("matmul", "offload")) == pytest.approx(longest)


def test_gradients_of_weights_that_wait_hide_nothing() -> None:
    parts = tuple(block(str(at), 3.0, 1.0, 2.0 if at < 2 else 0.0, weight=1.0) for at in range(3))
    shown = [price(staged(parts, parts, table), LINK).ledger.get("offload", 0.0) for table in (one_f_one_b, zb_h1)]
    assert shown == pytest.approx([0.0, 4 * 2 * (2.0 - 1.0)])


def staged(first: tuple[Part, ...], second: tuple[Part, ...], make: object) -> StepProfile:
    return step(
        "pp=2", first, second, microbatches=4, schedule=make(2, 4), crossing=((0, 0),), offload=ActivationOffload()
    )  # type: ignore[operator]


def test_a_disk_is_shared_by_the_ranks_of_a_node() -> None:
    on_disk = replace(profile(blocks(6, 1.0, 1.0, 1.0), to="disk"), spec=mk.MeshSpec.parse("dp_shard=4"))
    cluster = replace(LINK, host=Host(bytes_per_s=1e9, disk_bytes_per_s=2e9))
    assert price(on_disk, cluster).ledger["offload"] == pytest.approx((4 + 5) * (2.0 - 1.0))
    assert "offload" not in price(on_disk, LINK).ledger  # of which nobody says how fast it is
    fast = replace(LINK, host=Host(bytes_per_s=1e9, disk_bytes_per_s=1e12))
    assert price(on_disk, fast).seconds == price(on_disk, LINK).seconds


def test_where_the_host_computes_itself_nothing_is_hidden() -> None:
    cpu = replace(LINK, device=replace(LINK.device, kernels="cpu"))
    assert price(profile(blocks(6, 1.0, 2.0, 0.5)), cpu).ledger["offload"] == pytest.approx(2 * 5 * 0.5)


def forecast_with(offload: ActivationOffload | None = None, **choices: object) -> mk.preflight.forecast.Forecast:
    with torch.device("meta"):
        model = mk.models.Llama(SIZES)
    memory = MemoryPolicy(recompute=choices.pop("recompute", "none"), offload=offload)  # type: ignore[arg-type]
    strategy = Strategy(plan=mk.models.LLAMA_PLAN, memory=memory, **choices)  # type: ignore[arg-type]
    return mk.forecast(
        model, strategy, choices.pop("cluster", "h100"), mk.Batch(sequences=4, seq_len=64), spec="dp_shard=2"
    )  # type: ignore[arg-type]


def moved(told: mk.preflight.forecast.Forecast) -> list[int]:
    return [part.profile.moved_bytes for part in told.profile.stages[0] if part.is_block]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_forecast_moves_what_the_estimate_says_is_away(recompute: str) -> None:
    policy = ActivationOffload()
    told = forecast_with(policy, recompute=recompute)
    with torch.device("meta"):
        model = mk.models.Llama(SIZES)
    memory = MemoryPolicy(recompute=recompute, offload=policy)  # type: ignore[arg-type]
    strategy = Strategy(mesh="dp_shard=2", plan=mk.models.LLAMA_PLAN, memory=memory)
    traced = mk.estimate(model, strategy=strategy, rows=2, seq_len=64)
    sizes = moved(told)
    assert sizes[-1] == 0 and len(set(sizes[:-1])) == 1
    assert sum(sizes) <= traced.offloaded_bytes <= sum(sizes) + 4 * 4096 * 20  # of the host whole pages are taken
    if recompute == "full":
        assert sizes[0] == 4 * 2 * 64 * 64
    # Kernels are those without offload.
    plain = forecast_with(recompute=recompute)
    assert told.profile.stages[0][1].profile.ops == plain.profile.stages[0][1].profile.ops
    assert {name: seconds for name, seconds in told.ledger.items() if name != "offload"} == pytest.approx(plain.ledger)


def test_an_override_keeps_a_block_and_a_slower_link_shows() -> None:
    told = forecast_with(ActivationOffload(), overrides={"layers.1": BlockOverride(offload=False)})
    assert [size > 0 for size in moved(told)] == [True, False, True, True, False]
    slow, slower = (told.on(told.cluster.changed(**{"host.bytes_per_s": rate})) for rate in (1e9, 1e8))
    assert told.seconds <= slow.seconds < slower.seconds
    assert fsum(slower.ledger.values()) == pytest.approx(slower.seconds)
    assert slower.told.by_axis["computing"] > slow.told.by_axis["computing"]


def test_a_disk_of_which_nothing_is_known_is_said() -> None:
    told = forecast_with(ActivationOffload(to="disk"))
    assert "not priced: the disk, of which the cluster says no host.disk_bytes_per_s" in str(told)
    assert "not priced" not in str(told.on(told.cluster.changed(**{"host.disk_bytes_per_s": 1e10})))
    assert "not priced" not in str(forecast_with(ActivationOffload()))


def test_a_cluster_says_its_hosts_memory_and_disk_in_its_file() -> None:
    cluster = Cluster.read("h100").changed(**{"host.memory_bytes": 2e12, "host.disk_bytes_per_s": 1e10})
    assert Cluster.from_toml(cluster.to_toml()) == cluster
