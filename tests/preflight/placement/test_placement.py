"""Placement: equal to brute force over all orders, and to all stages of the speeds; searches of unlike ranks too."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, permutations, product

import pytest
import torch

import meshkit as mk
from meshkit.cluster import Tier, Unlike
from meshkit.errors import PlanError
from meshkit.preflight.estimate import MemoryProfiles, compose
from meshkit.preflight.forecast import Profiles
from meshkit.preflight.placement import Orders, _orders, min_max_partition
from meshkit.preflight.placement.command import command
from meshkit.resolve import resolve

BATCH = mk.Batch(sequences=16, seq_len=128)
NEAR = 1e-5


def model(layers: int = 4) -> torch.nn.Module:
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128}
    with torch.device("meta"):
        return mk.models.Llama(mk.models.LlamaConfig(**sizes, **heads))


def cluster(blocks: int, *, each: int = 1, node: int = 0, seed: int = 0, speeds: bool = True) -> mk.Cluster:
    """Random links of three kinds and devices of two speeds."""
    draw, ranks = random.Random(seed), blocks * each
    rates = [[0.0] * blocks for _ in range(blocks)]
    for i, j in product(range(blocks), repeat=2):
        if i < j:
            rates[i][j] = rates[j][i] = draw.choice((1e9, 2e8, 5e7))
    tiers = (Tier(name="all", ranks=ranks, bytes_per_s=1e9, latency_s=NEAR, per="group" if each > 1 else "rank"),)
    if (inside := node or (each if each > 1 else 0)) > 0:
        tiers = (Tier(name="node", ranks=inside, bytes_per_s=1e10, latency_s=1e-6), *tiers)
    unlike = Unlike(
        each=each,
        speed=tuple(draw.choice((1.0, 0.4)) for _ in range(blocks)) if speeds else (),
        bytes_per_s=tuple(map(tuple, rates)),
        latency_s=tuple(tuple(NEAR * 1e9 / rate if rate else 0 for rate in row) for row in rates),
    )
    base = mk.Cluster.read("cpu")
    return replace(base, tiers=tiers, collectives=(), host=replace(base.host, cores=0), unlike=unlike)


def brute(strategy: mk.Strategy, on: mk.Cluster, of: torch.nn.Module, orders, layers: int = 4) -> float:
    """The least seconds of all orders, each with all stages that are as fast as can be for some order's speeds."""
    spec, profiles = strategy.mesh_for(), Profiles()
    cuts = [None]
    if spec.pp > 1 and on.unlike.speed:
        cuts += [cut for cut in product(range(1, layers + 1), repeat=spec.pp) if sum(cut) == layers]
    least = float("inf")
    for cut in cuts:
        chosen = replace(strategy, pipeline=replace(strategy.pipeline, stages=cut))
        told = mk.forecast(of, chosen, on, BATCH, profiles=profiles)
        for order in orders:
            placed = replace(told, profile=replace(told.profile, spec=replace(spec, placement=order)))
            least = min(least, placed.on(on).seconds)
    return least


@pytest.mark.parametrize(
    ("mesh", "microbatches", "seed"),
    [("dp_shard=2 tp=2", 1, 0), ("pp=2 tp=2", 4, 1), ("pp=2 dp_shard=2", 4, 2), ("cp=2 tp=2", 1, 3), ("pp=4", 4, 4)],
)
def test_of_four_ranks_it_is_the_best_of_all_orders_and_stages(mesh, microbatches, seed) -> None:
    strategy, on, of = mk.Strategy(mesh=mesh, microbatches=microbatches), cluster(4, seed=seed), model()
    found = mk.place(of, strategy, on, BATCH)
    assert found.exact
    assert found.forecast.seconds == pytest.approx(brute(strategy, on, of, list(permutations(range(4)))), rel=0.005)
    # It is what `forecast` says of the strategy that it returns, and never slower than what was given.
    assert mk.forecast(of, found.strategy, on, BATCH).seconds == pytest.approx(found.forecast.seconds)
    assert found.forecast.seconds <= found.given.seconds


@pytest.mark.parametrize("seed", [0, 1])
def test_of_six_ranks_with_stages_that_stay_it_is_exactly_the_best(seed) -> None:
    pipeline = mk.strategy.PipelinePolicy(stages=(2, 2))
    strategy = mk.Strategy(mesh="pp=2 dp_shard=3", microbatches=2, pipeline=pipeline)
    on, of = cluster(6, seed=seed), model()
    batch_orders = list(permutations(range(6)))
    profiles = Profiles()
    told = mk.forecast(of, strategy, on, mk.Batch(sequences=12, seq_len=128), profiles=profiles)
    spec = strategy.mesh_for()
    least = min(
        replace(told, profile=replace(told.profile, spec=replace(spec, placement=order))).on(on).seconds
        for order in batch_orders
    )
    found = mk.place(of, strategy, on, mk.Batch(sequences=12, seq_len=128), profiles=profiles)
    assert found.forecast.seconds == least
    assert found.strategy.pipeline == pipeline


@pytest.mark.turns(8)
@pytest.mark.parametrize(("mesh", "seed"), [("pp=2 dp_shard=2 tp=2", 0), ("dp_shard=4 tp=2", 1)])
def test_of_eight_ranks_it_is_exactly_the_best(mesh, seed) -> None:
    strategy, on, of = mk.Strategy(mesh=mesh, microbatches=2), cluster(8, seed=seed, speeds=False), model()
    told = mk.forecast(of, strategy, on, BATCH)
    spec = strategy.mesh_for()
    orders = permutations(range(8))
    least = min(
        replace(told, profile=replace(told.profile, spec=replace(spec, placement=order))).on(on).seconds
        for order in orders
    )
    assert mk.place(of, strategy, on, BATCH).forecast.seconds == least


@pytest.mark.parametrize("seed", range(4))
def test_a_walk_finds_what_all_orders_have(monkeypatch, seed) -> None:
    strategy, on, of = mk.Strategy(mesh="pp=2 dp_shard=2 tp=2", microbatches=4), cluster(8, seed=seed), model()
    best = mk.place(of, strategy, on, BATCH)
    monkeypatch.setattr(_orders, "MOST", 0)
    walked = mk.place(of, strategy, on, BATCH)
    assert (best.exact, walked.exact) == (True, False)
    assert walked.forecast.seconds == best.forecast.seconds


def test_ranks_of_a_node_stay_together() -> None:
    on = cluster(8, node=4)
    orders = Orders.of(on, 8)
    every = list(orders.all())
    assert len(every) == orders.total == 2 * 24 * 24
    assert all({place // 4 for place in order[:4]} in ({0}, {1}) for order in every)
    whole = cluster(4, each=2)
    assert len(list(Orders.of(whole, 8).all())) <= 24
    found = mk.place(model(), mk.Strategy(mesh="dp_shard=4 tp=2"), whole, BATCH)
    placement = found.strategy.mesh.placement or tuple(range(8))
    assert all(placement[at + 1] == placement[at] + 1 for at in range(0, 8, 2))


def test_blocks_that_nothing_tells_apart_are_looked_at_once() -> None:
    rates = ((1e9,) * 4,) * 4
    base = cluster(4)
    alike = replace(base, unlike=Unlike(bytes_per_s=rates, latency_s=((NEAR,) * 4,) * 4))
    assert len(list(Orders.of(alike, 4).all())) == 1
    one_slow = replace(base, unlike=Unlike(speed=(1, 1, 0.5, 1)))
    assert len(list(Orders.of(one_slow, 4).all())) == 4
    assert len(list(Orders.of(cluster(4, seed=5), 4).all())) <= 24


@pytest.mark.parametrize("mesh", ["pp=4", "pp=2 dp_shard=2", "pp=2 tp=2"])
def test_where_tiers_say_the_links_it_is_the_best_of_all_orders(mesh) -> None:
    base = cluster(4)
    tiers = (
        Tier(name="rank", ranks=1, bytes_per_s=1e10, latency_s=1e-6),
        Tier(name="rack", ranks=2, bytes_per_s=1e9, latency_s=NEAR),
        Tier(name="all", ranks=4, bytes_per_s=3e6, latency_s=NEAR),
    )
    on, of = replace(base, tiers=tiers, unlike=Unlike(speed=(1, 1, 0.5, 1))), model()
    stages = (1, 1, 1, 1) if mesh == "pp=4" else (2, 2)
    pipeline = mk.strategy.PipelinePolicy(stages=stages)
    strategy = mk.Strategy(mesh=mesh, microbatches=4, pipeline=pipeline)
    told = mk.forecast(of, strategy, on, BATCH)
    least = min(
        replace(told, profile=replace(told.profile, spec=replace(told.profile.spec, placement=order))).on(on).seconds
        for order in permutations(range(4))
    )
    found = mk.place(of, strategy, on, BATCH)
    assert found.exact
    assert found.forecast.seconds == least < found.given.seconds


def test_alike_ranks_stay_as_they_are() -> None:
    strategy = mk.Strategy(mesh="dp_shard=2 tp=2")
    found = mk.place(model(), strategy, replace(cluster(4), unlike=None), BATCH)
    assert found.strategy == strategy
    assert "the ranks as they are" in str(found)


def test_a_slow_device_gets_a_stage_of_few_blocks() -> None:
    slow = replace(cluster(2), unlike=Unlike(speed=(0.25, 1)))
    found = mk.place(model(8), mk.Strategy(mesh="pp=2", microbatches=8), slow, BATCH)
    counts = found.strategy.pipeline.stages
    order = found.strategy.mesh.placement or (0, 1)
    assert counts[order.index(0)] < counts[order.index(1)]
    assert found.forecast.seconds < 0.6 * found.given.seconds
    assert f"(stages {','.join(map(str, counts))})" in str(found)


@pytest.mark.parametrize("seed", range(6))
def test_partition_by_speeds_is_the_least_of_all(seed) -> None:
    draw = random.Random(seed)
    seconds = [draw.choice((1.0, 2.0, 3.5)) for _ in range(9)]
    speeds = [draw.choice((1.0, 0.5, 0.3)) for _ in range(4)]
    first, last = draw.random(), 2 * draw.random()

    def slowest(cut) -> float:
        begins = [sum(cut[:at]) for at in range(5)]
        own = [sum(seconds[begin:end]) for begin, end in pairwise(begins)]
        own[0] += first
        own[-1] += last
        return max(each / speed for each, speed in zip(own, speeds, strict=True))

    cuts = [cut for cut in product(range(1, 7), repeat=4) if sum(cut) == 9]
    found = min_max_partition(seconds, 4, first=first, last=last, speeds=speeds)
    assert sum(found) == 9
    assert slowest(found) == pytest.approx(min(map(slowest, cuts)))


@pytest.mark.parametrize("seed", [0, 3])
def test_a_search_of_unlike_ranks_finds_the_best_strategy_and_placement(seed) -> None:
    on, of = cluster(4, seed=seed), model()
    space = mk.Space(
        data=(mk.strategy.DataPolicy(),),
        schedule=("1f1b",),
        recompute=("none",),
        sequence=(False,),
        zero=(None,),
        dp_replicate=(1,),
        microbatches=(1, 4),
    )
    every = mk.search(of, on, BATCH, world=4, space=space, exhaustive=True, recheck=False)
    found = mk.search(of, on, BATCH, world=4, space=space, recheck=False)
    assert found.winner.seconds == min(each.seconds for each in every.tried)
    for each in every.tried[:: max(1, len(every.tried) // 8)]:
        spec = replace(each.strategy.mesh_for(), placement=())
        given = replace(each.strategy, mesh=spec, pipeline=replace(each.strategy.pipeline, stages=None))
        assert each.seconds == mk.place(of, given, on, BATCH).forecast.seconds
    assert any(each.strategy.mesh.placement for each in every.tried)
    if found.winner.strategy.mesh.placement:
        assert "placement=" in found.flags


# ------------------------------------------------------------------------------------------------ memory of devices


def unlike_memory(sizes: tuple[float, ...], speed: tuple[float, ...] = ()) -> mk.Cluster:
    base = cluster(len(sizes))
    largest = replace(base.device, memory_bytes=max(sizes))
    return replace(base, device=largest, unlike=Unlike(speed=speed, memory_bytes=sizes))


MEMORY, PROFILES = MemoryProfiles(), Profiles()


def peaks_of(strategy: mk.Strategy, of: torch.nn.Module) -> list[int]:
    """Rank by rank, as composed: tests/preflight/estimate hold that against traces."""
    spec = replace(strategy.mesh_for(), placement=())
    resolved = resolve(PROFILES.program_of(of), replace(strategy, mesh=spec), spec)
    shape = {"rows": BATCH.rows(spec), "seq_len": BATCH.seq_len, "kernels": "cpu"}
    return [rank.peak_bytes for rank in compose(resolved, **shape, profiles=MEMORY).ranks]


@pytest.mark.parametrize("speed", [(), (0.5, 1.0)])
def test_a_smaller_device_has_the_blocks_that_fit_it(speed) -> None:
    of, strategy = model(layers=8), mk.Strategy(mesh="pp=2", microbatches=4)
    cuts = [replace(strategy, pipeline=mk.strategy.PipelinePolicy(stages=(n, 8 - n))) for n in range(1, 8)]
    needs = [peaks_of(each, of) for each in cuts]
    # Room on one device for what the larger half of every cut with three blocks needs, on the other for all.
    small = max(needs[2][0], needs[4][1]) * 1.005
    on = unlike_memory((small, 1e12), speed)
    found = mk.place(of, strategy, on, BATCH)
    least = float("inf")
    for each, need in zip(cuts, needs, strict=True):
        for order in ((0, 1), (1, 0)):
            if all(size <= on.unlike.memory_bytes[rank] for size, rank in zip(need, order, strict=True)):
                placed = replace(each, mesh=mk.MeshSpec(pp=2, placement=order))
                least = min(least, mk.forecast(of, placed, on, BATCH, profiles=PROFILES).seconds)
    assert found.forecast.seconds == pytest.approx(least, rel=1e-6)
    assert found.lacks_bytes == 0 < found.given_lacks_bytes
    assert "as they are a rank lacks" in str(found)
    seats = found.strategy.mesh.placement or (0, 1)
    for rank, need in zip(seats, peaks_of(found.strategy, of), strict=True):
        assert need <= on.unlike.memory_bytes[rank]


def test_where_no_order_fits_it_says_what_lacks() -> None:
    with pytest.raises(PlanError, match="place: on every order of ranks one of them lacks memory, .* at least"):
        mk.place(
            model(), mk.Strategy(mesh="pp=2 dp_shard=2", microbatches=4), unlike_memory((1e6, 2e6, 1e6, 2e6)), BATCH
        )


def test_smaller_devices_are_the_ranks_that_need_less() -> None:
    """The first stage keeps more microbatches: it is on the large devices, wherever these are."""
    of = model()
    strategy = mk.Strategy(mesh="pp=2 dp_shard=2", microbatches=8, pipeline=mk.strategy.PipelinePolicy(stages=(2, 2)))
    first, last = peaks_of(strategy, of)
    small, large = sorted((first, last))
    assert large > 1.05 * small
    on = unlike_memory((small * 1.006, large * 1.006, small * 1.006, large * 1.006))
    found = mk.place(of, strategy, on, BATCH)
    fullest = 0 if first > last else 1
    placement = found.strategy.mesh.placement
    assert set(placement[2 * fullest : 2 * fullest + 2]) == {1, 3}


def test_a_search_fits_every_device() -> None:
    of = model()
    space = mk.Space(
        data=(mk.strategy.DataPolicy(),),
        schedule=("1f1b",),
        recompute=("none",),
        sequence=(False,),
        zero=(None,),
        dp_replicate=(1,),
        tp=(1,),
        microbatches=(4,),
    )
    roomy = mk.search(
        of, unlike_memory((1e12,) * 4), BATCH, world=4, space=space, device_memory=10**12, exhaustive=True
    )
    needs = [[rank.peak_bytes for rank in each.memory.ranks] for each in roomy.tried]
    # One device has what the lightest rank of all needs, the others have enough for any.
    on = unlike_memory((max(map(max, needs)),) * 3 + (min(map(min, needs)) * 1.001,))
    every = mk.search(of, on, BATCH, world=4, space=space, device_memory=10**12, exhaustive=True, recheck=False)
    found = mk.search(of, on, BATCH, world=4, space=space, device_memory=10**12, recheck=False)
    fitting = [each for each in every.tried if each.fits(10**12)]
    assert 0 < len(fitting) < len(every.tried)
    assert found.winner.seconds == min(each.seconds for each in fitting)
    placement = found.winner.strategy.mesh.placement or (0, 1, 2, 3)
    share = 4 // found.winner.strategy.mesh_for().pp
    for rank, need in enumerate(peaks_of(found.winner.strategy, of)):
        assert need <= 1.005 * min(
            on.unlike.memory_bytes[seat] for seat in placement[rank * share : (rank + 1) * share]
        )
    # Without a number memory is looked at nowhere.
    free = mk.search(of, on, BATCH, world=4, space=space, recheck=False)
    assert free.winner.seconds <= found.winner.seconds
    assert free.unfit == 0


@pytest.mark.parametrize("seed", range(6))
def test_stages_of_at_most_so_many_blocks_are_the_best_of_all(seed) -> None:
    draw = random.Random(seed)
    seconds, speeds = [draw.uniform(1, 3) for _ in range(7)], [draw.choice((1.0, 0.5)) for _ in range(3)]
    most = [draw.randint(1, 5) for _ in range(3)]
    most[draw.randrange(3)] = 6
    cuts = [cut for cut in product(range(1, 8), repeat=3) if sum(cut) == 7 and all(map(int.__le__, cut, most))]

    def slowest(cut: tuple[int, ...]) -> float:
        begins = [sum(cut[:at]) for at in range(3)]
        return max(sum(seconds[b : b + n]) / s for b, n, s in zip(begins, cut, speeds, strict=True))

    found = min_max_partition(seconds, 3, speeds=speeds, most=most)
    assert found in cuts
    assert slowest(found) == pytest.approx(min(map(slowest, cuts)))


def test_a_world_of_a_part_of_a_block_is_refused() -> None:
    with pytest.raises(PlanError, match="a world of 3 ranks .* blocks of 2"):
        mk.place(model(), mk.Strategy(mesh="dp_shard=3"), cluster(4, each=2), mk.Batch(sequences=3, seq_len=128))


def test_the_command_prints_flags_and_writes_the_strategy(tmp_path, capsys) -> None:
    cluster(4, seed=1).write(tmp_path / "mine.toml")
    script = str(mk.__path__[0]) + "/../examples/llama_pretrain.py"
    flags = ["--mesh", "pp=2 tp=2", "--cluster", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "s.toml")]
    command([script, *flags, "--microbatches", "4"])
    said = capsys.readouterr().out
    assert "steps priced, of all orders" in said
    written = mk.Strategy.read(tmp_path / "s.toml")
    assert written.mesh.pp == 2
    assert (written.mesh.text in said) or "as they are" in said
