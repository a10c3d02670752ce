"""Search: bounds cut nothing that exhaustive forecasting would choose; what is proposed is legal and fits."""

import itertools
import time
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

import meshkit as mk
from meshkit.cluster import PowerPoint
from meshkit.errors import PlanError
from meshkit.parallel.pipeline import peak_live
from meshkit.parallel.pipeline.schedules import NAMES, named
from meshkit.parallel.shardings import shardings_of, spread_of
from meshkit.preflight.placement import min_max_partition
from meshkit.preflight.search import svg
from meshkit.preflight.search._goal import parse_goal
from meshkit.preflight.search._mix import mixed_recompute
from meshkit.preflight.search._neighbours import neighbours
from meshkit.preflight.search._pricing import Pricing
from meshkit.preflight.search._space import Group
from meshkit.preflight.search._world import Level, World
from meshkit.preflight.search.command import Search, _space, command
from meshkit.program import read_program
from meshkit.resolve import resolve, resolve_alike
from meshkit.step import next_token_loss
from meshkit.strategy import LEVELS as RANK
from meshkit.strategy import DataPolicy

RECIPE = Path(__file__).parents[3] / "examples" / "llama_pretrain.py"


def dense(**changes):
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512}
    with torch.device("meta"):
        return mk.models.Llama(mk.models.LlamaConfig(**(sizes | heads | changes)))


def moe(experts=4):
    with torch.device("meta"):
        return mk.models.Mixtral(replace(MOE, num_local_experts=experts))


def _moe_config():
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128}
    return mk.models.MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2)


MOE = _moe_config()
EXPERTS = mk.Strategy(plan=mk.models.model_plan(MOE))


SPACE = mk.Space(
    data=(DataPolicy(),),
    pp=(1, 2),
    tp=(1, 2),
    dp_replicate=(1,),
    microbatches=(2, 4),
    schedule=("1f1b", "zb-h1"),
    zero=(None,),
    sequence=(True,),
    recompute=("none", "full"),
)
FEWER = replace(SPACE, tp=(1,), microbatches=(4,), schedule=("1f1b",), dp_intra=(4,))  # of experts, which take longer
SCHEMES = replace(
    SPACE,
    pp=(1,),
    cp=(1, 2, 4),
    microbatches=(2,),
    recompute=("none", "full"),
    scheme=("auto", "all_gather", "ring", "ulysses"),
)
# All rows of shardings that differ where there are no replicas.
LEVELS = ("none", "node", "all")
ROWS = replace(
    SPACE,
    pp=(1,),
    dp_replicate=(1, 2),
    zero=(None,),
    recompute=("none",),
    data=tuple(DataPolicy(parameters=one, gradients=other) for one, other in product(LEVELS, repeat=2)),
)
# Where launches and latencies cost nothing, the bound is within 10 % of small models' steps too: a wrong one shows.
FREE = {"device.launch_s": 0.0, "tiers.0.latency_s": 0.0, "tiers.1.latency_s": 0.0}
CLUSTER = mk.Cluster.read("h100").changed(**FREE)
BATCH = mk.Batch(sequences=64, seq_len=128)
SMALL = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4, "vocab_size": 256}


@pytest.mark.timeout(900)  # up to 200 s of a processor
@pytest.mark.parametrize(
    ("make", "fixed", "space", "ranks"),
    [
        (dense, mk.Strategy(), SPACE, 16),
        (lambda: dense(tie_word_embeddings=True, num_hidden_layers=5), mk.Strategy(), SPACE, 16),
        (moe, mk.Strategy(), SPACE, 16),
        (dense, mk.Strategy(), ROWS, 16),
        (dense, mk.Strategy(), SCHEMES, 4),
        (moe, EXPERTS, FEWER, 8),
    ],
)
def test_bounds_cut_nothing_that_exhaustive_would_choose(make, fixed, space, ranks):
    model = make()
    every = mk.search(model, CLUSTER, BATCH, world=ranks, space=space, fixed=fixed, exhaustive=True)
    world = World(Pricing(model, CLUSTER, BATCH, next_token_loss, "time"), ranks, 1, exhaustive=False, balance=True)
    world.add([Group(each.strategy, (each.strategy.mesh_for(),)) for each in every.tried])
    for each in every.tried:
        assert 0 < world.mean_s(each.strategy, Level.WHOLE) <= each.seconds
        for level in (Level.SENT, Level.TABLED, Level.TRACED, Level.OWN):
            assert 0 < world.least_s(each.strategy, level) <= each.seconds, level
        for level in (Level.WHOLE, Level.SENT, Level.OWN):
            assert 0 < world.least_bytes(each.strategy, level) <= each.peak_bytes, level
    peaks = sorted(each.peak_bytes for each in every.tried)
    for memory in (None, peaks[len(peaks) // 3], peaks[0]):
        best = min(each.seconds for each in every.tried if each.fits(memory))
        found = mk.search(
            model, CLUSTER, BATCH, world=ranks, space=space, fixed=fixed, device_memory=memory, recheck=False
        )
        assert found.winner is not None
        assert found.winner.seconds == best
        assert found.winner.fits(memory)
        assert len(found.tried) <= len(every.tried)
        assert found.neighbours
        assert found.flags in str(found)


@pytest.mark.parametrize(
    "mesh", ["dp_shard=4", "dp_shard=4 tp=2", "dp_shard=4 tp=2 ep=2", "dp_shard=4 tp=2 ep=4 etp=2"]
)
def test_the_states_of_a_bound_are_those_that_a_rank_holds(mesh):
    """Experts are shared by the ranks of tp too, whatever ep and etp are."""
    strategy = replace(EXPERTS, mesh=mk.MeshSpec.parse(mesh))
    pricing = Pricing(moe(experts=8), CLUSTER, BATCH, next_token_loss, "time")  # at least one for each of 8 ranks
    at_peak = pricing.peak(strategy).at_peak
    states = at_peak["parameters"] + at_peak["optimizer state"]
    elements, spec = pricing.elements(strategy), strategy.mesh_for()
    bound = 3 * 4 * elements.total / spec.dp_shard
    assert bound <= states
    assert bound > 0.9 * states  # tp may leave embeddings whole
    assert elements.experts.sum() == 3 * 8 * 3 * 128 * 256 / (spec.ep * spec.etp)


def test_nothing_fits():
    nothing = mk.search(dense(), "h100", BATCH, world=16, space=SPACE, device_memory=1000)
    assert nothing.best is None
    assert "nothing fits" in str(nothing)


def test_partition_is_the_least_of_all():
    seconds = [1.0, 4.0, 2.0, 2.0, 3.0, 1.0, 5.0]

    def slowest(counts, first=0.5, last=2.5):
        ends = [sum(counts[:at]) for at in range(len(counts) + 1)]
        own = [sum(seconds[a:b]) for a, b in pairwise(ends)]
        own[0] += first
        own[-1] += last
        return max(own)

    for stages in range(1, 8):
        cuts = combinations(range(1, 7), stages - 1)
        every = [tuple(b - a for a, b in pairwise((0, *cut, 7))) for cut in cuts]
        told = min_max_partition(seconds, stages, first=0.5, last=2.5)
        assert told in every
        assert slowest(told) == min(map(slowest, every))


def test_a_goal_that_there_is_not():
    with pytest.raises(PlanError, match="goal='joules'"):
        mk.search(dense(), "h100", BATCH, world=16, goal="joules")
    with pytest.raises(PlanError, match="cluster 'h100' says no watts"):
        mk.search(dense(), "h100", BATCH, world=16, goal="energy")
    with pytest.raises(PlanError, match="the function returned None. Return a number"):
        mk.search(dense(**SMALL), CLUSTER, BATCH, world=2, space=SPACE, goal=lambda told: None)


def test_a_goal_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def bubble(told):\n    return told.ledger.get('bubble', 0.0)\n\n\nRATE = 2\n")
    assert parse_goal("fewest ranks") == "fewest ranks"
    assert parse_goal(f"{file}:bubble").__name__ == "bubble"
    with pytest.raises(PlanError, match="has no function 'RATE'"):
        parse_goal(f"{file}:RATE")
    with pytest.raises(PlanError, match="choose one of time, cost, energy, fewest ranks, or give"):
        parse_goal(f"{tmp_path / 'none.py'}:bubble")
    file.write_text("import nothing_of_this_name\n")
    with pytest.raises(PlanError, match="cannot be imported: ModuleNotFoundError"):
        parse_goal(f"{file}:bubble")


POWER = (PowerPoint(mhz=1980, watts=700.0), PowerPoint(mhz=1410, watts=450.0, slowdown=1.27))
WATTS = replace(CLUSTER, device=replace(CLUSTER.device, power=POWER, idle_watts=100.0))


def slowest_link(told):
    """Seconds that are seen of messages."""
    return sum(told.ledger.get(axis, 0.0) for axis in ("tp", "pp", "dp_shard", "dp_replicate"))


@pytest.mark.parametrize("goal", ["time", "cost", "energy", "fewest ranks", slowest_link])
def test_the_winner_of_each_goal_is_the_exhaustive_one(goal):
    model, space = dense(**SMALL), replace(SPACE, dp_replicate=(1, 2))
    every = {
        world: mk.search(model, WATTS, BATCH, world=world, space=space, exhaustive=True, recheck=False).tried
        for world in ((2, 4) if goal == "fewest ranks" else (4,))
    }
    peaks = sorted(each.peak_bytes for each in every[4])
    memory = peaks[len(peaks) // 3]
    fitting = {world: [each for each in found if each.fits(memory)] for world, found in every.items()}
    least = {
        "time": lambda each: each.seconds,
        "cost": lambda each: 4 * each.seconds,
        "energy": lambda each: each.forecast.joules,
        "fewest ranks": lambda each: each.seconds,
    }.get(goal, lambda each: slowest_link(each.forecast))
    world = min(world for world, found in fitting.items() if found)
    found = mk.search(model, WATTS, BATCH, world=4, space=space, device_memory=memory, goal=goal, recheck=False)
    assert found.winner.ranks == world
    assert least(found.winner) == min(map(least, fitting[world]))
    front = [(each.seconds, each.peak_bytes, each.ranks, each.forecast.joules) for each in found.front]
    assert not any(all(a <= b for a, b in zip(one, other, strict=True)) for one, other in permutations(front, 2))


def test_an_ended_search_says_by_how_much_another_may_be_better(monkeypatch):
    model, space = dense(**SMALL), replace(SPACE, dp_replicate=(1, 2))
    clock = itertools.count()
    monkeypatch.setattr(time, "process_time", lambda: next(clock))

    def found(limit_s):
        return mk.search(model, CLUSTER, BATCH, world=4, space=space, recheck=False, limit_s=limit_s)

    every = found(1e9)
    looked = next(clock) - 1
    assert every.gap == 0
    winners = []
    for limit in (0, looked // 2, looked - 2):
        ended = found(limit)
        assert len(ended.tried) <= len(every.tried)
        winners.append(ended.winner)
        if ended.winner is None:
            assert "nothing fits in" not in str(ended) and "of what was looked at before the limit" in str(ended)
        else:
            assert ended.winner.seconds * (1 - ended.gap) <= every.winner.seconds <= ended.winner.seconds
            assert (f"nothing is better by more than {ended.gap:.1%}" in str(ended)) == (ended.gap > 0)
    assert winners[0] is None and winners[-1] is not None


def test_a_neighbour_whose_mesh_cannot_be_is_refused_also_of_an_ended_search():
    """A best with ep=8: on pp=2 there are four ranks of a stage."""
    space = replace(FEWER, pp=(1, 2))
    pricing = Pricing(moe(experts=8), CLUSTER, BATCH, next_token_loss, "time")
    best = pricing.tried(replace(EXPERTS, mesh="dp_shard=8 ep=8", microbatches=1))
    sizes = space.sizes(8, node=4, experts=8)
    found = neighbours(pricing, best, EXPERTS, space, sizes, None, node=4, ended=True)
    assert any(each.change == "pp=2" and "ep" in each.why for each in found), found


def test_joules_are_those_of_computing_and_of_waiting():
    told = mk.forecast(dense(**SMALL), mk.Strategy(mesh="dp_shard=2"), WATTS, mk.Batch(sequences=4, seq_len=128))
    names = ("matmul", "attention", "other kernels", "recompute", "optimizer")
    busy_s = sum(told.ledger.get(name, 0.0) for name in names)
    assert told.joules == pytest.approx(2 * (700 * busy_s + 100 * (told.seconds - busy_s)))
    assert f"{told.joules:,.4g} J" in str(told)
    assert told.on(CLUSTER).joules is None


def test_what_is_fixed_stays():
    fixed = mk.Strategy(mesh="tp=2", memory=mk.MemoryPolicy(recompute="full"))
    found = mk.search(dense(), "h100", BATCH, world=8, space=SPACE, fixed=fixed, recheck=False)
    assert {each.strategy.mesh.tp for each in found.tried} == {2}
    assert {each.strategy.memory.recompute for each in found.tried} == {found.best.memory.recompute}


def test_a_placement_of_a_fixed_mesh_is_refused():
    fixed = mk.Strategy(mesh="pp=2 tp=2 placement=0-2-1-3")
    with pytest.raises(PlanError, match="has a placement, which is of one mesh"):
        mk.search(dense(), CLUSTER, BATCH, world=4, space=SPACE, fixed=fixed)


def test_states_on_the_host_are_the_answer_where_nothing_else_fits():
    space = replace(SPACE, offload=(False, True), tp=(1,), pp=(1,), recompute=("full",), microbatches=(4,))
    every = mk.search(dense(), CLUSTER, BATCH, world=4, space=space, exhaustive=True, recheck=False)
    on_host = [each for each in every.tried if each.strategy.memory.optimizer.offload is not None]
    others = [each for each in every.tried if each.strategy.memory.optimizer.offload is None]
    assert len(on_host) == len(others) > 0
    least = min(each.peak_bytes for each in others)
    assert min(each.peak_bytes for each in on_host) < least
    assert min(each.seconds for each in on_host) > min(each.seconds for each in others)
    for memory, among in ((None, every.tried), (least - 1, [each for each in on_host if each.peak_bytes < least])):
        found = mk.search(dense(), CLUSTER, BATCH, world=4, space=space, device_memory=memory, recheck=False)
        assert found.winner.seconds == min(each.seconds for each in among)
    assert found.winner.strategy.memory.optimizer.offload is not None
    assert "--optimizer-offload" in found.flags
    assert any("optimizer on the device" in str(each) for each in found.neighbours)
    stays = mk.search(dense(), CLUSTER, BATCH, world=4, space=space, fixed=found.winner.strategy, recheck=False)
    assert {each.strategy.memory.optimizer.offload for each in stays.tried} == {mk.strategy.OptimizerOffload()}


@pytest.mark.parametrize(
    ("mesh", "given", "axes"),
    [
        ("tp=1 dp_shard=-1", {"mesh"}, {"tp": (1,)}),
        ("pp=2,tp=1", {"mesh"}, {"pp": (2,), "tp": (1,)}),
        ("dp_shard=-1x2,tp=1", {"mesh"}, {"dp_intra": (2,), "tp": (1,)}),
        ("dp_shard=-1", set(), {}),
    ],
)
def test_an_axis_that_the_flag_says_is_1_stays_1(mesh, given, axes):
    asked = _space(Search(script=RECIPE, world=4), mk.Strategy(), given, mesh)
    assert asked == mk.Space(**axes)
    sizes = {each.tp for alike in asked.meshes(4, node=8, experts=0) for each in alike}
    assert sizes == ({1} if "tp" in axes else {1, 2, 4})


@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        ("dp_shard=4", mk.strategy.PipelinePolicy()),
        ("pp=2 dp_shard=2", mk.strategy.PipelinePolicy()),
        ("pp=2 dp_shard=2", mk.strategy.PipelinePolicy(schedule="interleaved")),
    ],
    ids=["no stages", "1f1b", "interleaved"],
)
def test_a_mixture_of_recompute_is_the_fastest_that_fits_of_all_numbers_of_blocks(mesh, pipeline):
    """Brute force over the blocks of each rank of pp that run again, each priced by `forecast` and by `compose`."""
    model, batch = dense(num_hidden_layers=4, **SMALL), mk.Batch(sequences=32, seq_len=128)
    plain = mk.Strategy(mesh=mesh, microbatches=4, pipeline=pipeline)
    pricing = Pricing(model, CLUSTER, batch, next_token_loss, "time")
    cut = pricing.resolved(plain).cut
    ranks = plain.mesh_for().pp
    every_block = [f"layers.{at}" for at in range(4)]
    of_rank = [
        every_block if cut is None else [name for at in cut.stages_of(rank) for name in cut.stages.blocks[at]]
        for rank in range(ranks)
    ]
    every = {}
    for counts in product(*(range(len(blocks) + 1) for blocks in of_rank)):
        names = [name for blocks, count in zip(of_rank, counts, strict=True) for name in blocks[:count]]
        mixed = replace(plain, overrides={name: mk.strategy.BlockOverride(recompute="full") for name in names})
        told = mk.forecast(model, mixed, CLUSTER, batch, profiles=pricing.profiles)
        every[counts] = told.seconds, pricing.peak(mixed).peak_bytes, mixed
    least, most = every[tuple(map(len, of_rank))][1], every[(0,) * ranks][1]
    assert least < most
    space = mk.Space(**{axis: (getattr(plain.mesh_for(), axis),) for axis in ("pp", "dp_shard", "tp", "dp_replicate")})
    space = replace(space, recompute=("none", "full"), zero=(None,), microbatches=(4,), mix=True, balance=False)
    space = replace(space, schedule=(pipeline.schedule,))
    mixtures, added = 0, 0.0
    for share in (0.01, 0.35, 0.7, 1.0):
        memory = int(least + share * (most - least))
        fastest = min(seconds for seconds, peak, _ in every.values() if peak <= memory)
        world = World(pricing, 4, memory, exhaustive=False, balance=False)
        heaviest = every[tuple(map(len, of_rank))][2]
        world.add([Group(each, (plain.mesh_for(),)) for each in (plain, heaviest)])
        for level in (Level.SENT, Level.TABLED, Level.TRACED, Level.OWN):
            light_s, mixed_s = world.least_s(plain, level), world.least_s(plain, level, "full")
            assert light_s <= mixed_s <= fastest, level
            added += mixed_s - light_s
        mixed = mixed_recompute(pricing, plain, "full", memory)
        assert pricing.forecast(mixed).seconds == fastest
        assert pricing.peak(mixed).peak_bytes <= memory
        if share not in (0.35, 0.7):
            continue  # each search traces for seconds
        found = mk.search(
            model,
            CLUSTER,
            batch,
            world=4,
            space=space,
            fixed=replace(plain, mesh=None),
            device_memory=memory,
            recheck=False,
        )
        assert found.winner.seconds == fastest
        unmixed = [every[tuple(map(len, of_rank))][0], every[(0,) * ranks][0]]
        assert bool(found.best.overrides) == (fastest not in unmixed)
        assert not found.best.overrides or "recompute=none: does not fit" in str(found)
        mixtures += bool(found.best.overrides)
    assert mixtures
    assert added > 0
    assert mixed_recompute(pricing, plain, "full", least - 1) is None


def test_a_search_that_mixes_finds_what_the_exhaustive_one_does():
    model = dense(**SMALL)
    space = replace(SPACE, mix=True, microbatches=(4,), recompute=("none", "selective", "full"), schedule=("1f1b",))
    space = replace(space, tp=(1,), balance=False)
    peaks = sorted(
        each.peak_bytes
        for each in mk.search(model, CLUSTER, BATCH, world=2, space=space, exhaustive=True, recheck=False).tried
    )
    for memory in ((peaks[0] + peaks[1]) // 2, (peaks[0] + peaks[-1]) // 2):
        every = mk.search(
            model, CLUSTER, BATCH, world=2, space=space, device_memory=memory, exhaustive=True, recheck=False
        )
        found = mk.search(model, CLUSTER, BATCH, world=2, space=space, device_memory=memory, recheck=False)
        assert any(each.strategy.overrides for each in every.tried)
        assert found.winner.seconds == min(each.seconds for each in every.tried if each.fits(memory))


HPZ = DataPolicy(parameters="node")


def test_a_row_of_shardings_that_is_fixed_stays_and_is_refused_by_resolve_where_there_are_stages():
    model, fixed = dense(**SMALL), mk.Strategy(mesh="dp_shard=4x2", data=HPZ, microbatches=2)
    space = replace(SPACE, pp=None, tp=(1,), dp_replicate=None, microbatches=None, recompute=("none",))
    found = mk.search(model, CLUSTER, BATCH, world=8, space=space, fixed=fixed, exhaustive=True, recheck=False)
    assert [(each.strategy.data, each.strategy.mesh) for each in found.tried] == [(HPZ, fixed.mesh)]
    assert "(shardings node-all-all)" in found.flags
    staged = replace(space, pp=(2,))
    found = mk.search(model, CLUSTER, BATCH, world=8, space=staged, fixed=mk.Strategy(data=HPZ), recheck=False)
    assert found.best is None and not found.tried
    assert any("with pp: parameters are gathered once a step" in text for text in found.refused)


def test_of_rows_that_spread_everything_over_as_many_ranks_one_is_tried():
    """By the meshes and rows themselves: no two strategies have the same ranks for everything, and none is left out."""
    batch = mk.Batch(sequences=64, seq_len=32)
    every = tuple(
        DataPolicy(parameters=one, gradients=other, states=states)
        for one, other, states in product((*LEVELS, "replicas"), repeat=3)
        if states != "none" and max(map(RANK.index, (one, other))) <= RANK.index(states)
    )
    space = mk.Space(pp=(1, 2), tp=(1,), zero=(None, 1, 2, 3), recompute=("none",), microbatches=(1,), data=every)
    asked, tried = set(), []
    for replicas, stages in product((1, 2, 4, 8, 16, 32), (1, 2)):
        shards = 32 // replicas // stages
        for zero, policy in [*((zero, DataPolicy()) for zero in (None, 1, 2, 3)), *((None, each) for each in every)]:
            nodes = "node" in (policy.parameters, policy.gradients, policy.states)
            if not shards or (nodes and (shards % 8 or not shards)):
                continue
            spec = mk.MeshSpec(pp=stages, dp_replicate=replicas, dp_shard=shards, dp_intra=8 if nodes else 1)
            try:
                asked.add(
                    (stages, replicas, shards, spread_of(shardings_of(mk.Strategy(zero=zero, data=policy), spec), spec))
                )
            except PlanError:
                continue
    for strategy in space.strategies(batch, 32, mk.Strategy(), node=8, experts=0):
        spec = strategy.mesh_for()
        if strategy.pipeline.schedule == "1f1b":
            row = spread_of(shardings_of(strategy, spec), spec)
            tried.append((spec.pp, spec.dp_replicate, spec.dp_shard, row))
    assert len(tried) == len(set(tried)) > 50
    assert set(tried) == asked


def test_a_secondary_copy_in_a_node_pays_where_a_node_has_one_link_and_not_where_each_rank_has_one():
    """hpZ against ZeRO-3: its gathers stay in nodes, but those that leave them go over the links of all ranks of a node."""
    model, batch = dense(), mk.Batch(sequences=64, seq_len=32)
    shared = replace(CLUSTER, tiers=(CLUSTER.tiers[0], replace(CLUSTER.tiers[1], per="group")))

    def sent_s(cluster, data):
        told = mk.forecast(model, mk.Strategy(mesh="dp_shard=4x8", microbatches=2, data=data), cluster, batch)
        return sum(seconds for name, seconds in told.ledger.items() if name.startswith("dp_"))

    rails, one = ([sent_s(cluster, data) for data in (DataPolicy(states="all"), HPZ)] for cluster in (CLUSTER, shared))
    assert 0.8 < rails[1] / rails[0] < 1.25
    # 2 gathers and a reduction of each microbatch leave the node; with copies one gather in all, and the reductions, of fp32.
    assert one[1] / one[0] == pytest.approx((1 + 2) / (4 + 2), rel=0.15)


def test_the_space_keeps_what_is_the_default_anyway():
    space = replace(SPACE, recompute=("none",), tp=(1,))
    found = mk.search(dense(**SMALL), "h100", BATCH, world=4, space=space, exhaustive=True, recheck=False)
    assert {(each.strategy.memory.recompute, each.strategy.mesh.tp) for each in found.tried} == {("none", 1)}


def test_the_command_prints_flags_and_writes_the_winner(tmp_path, capsys):
    out = tmp_path / "strategy.toml"
    picture = tmp_path / "front.svg"
    args = [str(RECIPE), "--world", "4", "--cluster", "cpu", "--recompute", "none", "--schedules", "1f1b"]
    command([*args, "--global-batch", "8", "--seq-len", "64", "--out", str(out), "--svg", str(picture)])
    said = capsys.readouterr().out
    assert "--mesh" in said
    assert "priced" in said
    best = mk.Strategy.read(out)
    assert best.mesh_for().world_size == 4
    assert best.memory.recompute == "none"
    ET.parse(picture)


def test_the_picture_has_a_dot_for_all_that_was_priced_and_a_front_that_nothing_beats():
    space = replace(SPACE, tp=(1,))
    found = mk.search(dense(**SMALL), CLUSTER, BATCH, world=4, space=space, device_memory=2**33, exhaustive=True)
    picture = ET.fromstring(svg(found))
    dots = [each.get("class") for each in picture.iter("{http://www.w3.org/2000/svg}circle")]
    assert dots.count("front") == len(found.front)
    assert dots.count("other") == len(found.tried) - len(found.front)
    assert dots.count("best") == 1
    for each in found.tried:
        better = [one for one in found.tried if one.seconds <= each.seconds and one.peak_bytes <= each.peak_bytes]
        alike = all((one.seconds, one.peak_bytes) == (each.seconds, each.peak_bytes) for one in better)
        assert (each in found.front) <= alike
    nothing = mk.search(dense(**SMALL), CLUSTER, BATCH, world=4, space=space, device_memory=1000)
    assert len(list(ET.fromstring(svg(nothing)).iter("{http://www.w3.org/2000/svg}circle"))) == 0


@pytest.mark.parametrize(
    ("world", "space"),
    [
        (
            8,
            mk.Space(
                tp=(1, 2),
                dp_replicate=(1,),
                schedule=("interleaved", "zbv"),
                recompute=("full",),
                balance=False,
                data=(DataPolicy(), HPZ),
                dp_intra=(2,),
            ),
        ),
        (
            64,
            mk.Space(
                pp=(1, 2, 8),
                tp=(1, 8),
                dp_replicate=(1, 2, 64),
                recompute=("none",),
                balance=False,
                rows=1,
                data=(DataPolicy(),),
            ),
        ),
    ],
)
def test_what_is_legal_is_priced_and_what_is_refused_is_not(world, space):
    """Each strategy is resolved again by itself: the search decides for many at once."""
    model = dense(num_hidden_layers=2, num_key_value_heads=2, **SMALL)
    batch = mk.Batch(sequences=64, seq_len=32)
    found = mk.search(model, CLUSTER, batch, world=world, space=space, exhaustive=True)
    program = read_program(model)
    legal = set()
    strategies = list(space.strategies(batch, world, mk.Strategy(), node=8, experts=0))
    for strategy in strategies:
        try:
            resolved = resolve(program, strategy, strategy.mesh_for(), device_type="cuda")
            resolved.refuse_tokens(batch.seq_len)
        except PlanError:
            continue
        legal.add(repr(strategy))
    assert {repr(each.strategy) for each in found.tried} == legal
    assert 0 < len(legal) < len(strategies)
    assert sum(found.refused.values()) == len(strategies) - len(legal)


def test_what_is_resolved_for_many_is_what_each_is():
    model = dense(num_hidden_layers=4, **SMALL)
    alone, shared = read_program(model), read_program(model)
    space = mk.Space(
        pp=(1, 2),
        tp=(1, 2),
        microbatches=(1, 2, 4),
        schedule=("1f1b", "zb-h1"),
        recompute=("none", "full"),
        data=(DataPolicy(), HPZ),
    )
    seen = 0
    for strategy in space.strategies(mk.Batch(sequences=64, seq_len=32), 8, mk.Strategy(), node=8, experts=0):
        spec = strategy.mesh_for()
        one, other = resolve(alone, strategy, spec), resolve_alike(shared, strategy, spec)
        assert (other.strategy, other.spec) == (strategy, spec)
        for name in (
            "plan",
            "blocks",
            "units",
            "mlps",
            "shardings",
            "sequence",
            "compute",
            "head",
            "treatments",
            "whole",
        ):
            assert getattr(one, name) == getattr(other, name), name
        assert (one.cut is None) == (other.cut is None)
        assert one.cut is None or (one.cut.stages, one.cut.placement) == (other.cut.stages, other.cut.placement)
        assert (one.layout is None) == (other.layout is None)
        seen += 1
    assert seen > 50


def test_what_is_alive_grows_with_the_microbatches_until_the_pipeline_is_full():
    """By which a short table bounds the bytes of a long one."""
    for name, ranks in product(NAMES, (2, 3, 4)):
        lives = []
        for count in (2 * ranks, 3 * ranks, 4 * ranks, 8 * ranks):
            table = named(name)(ranks, count)
            lives.append([peak_live(task for row in rows for task in row.tasks) for rows in table.ranks])
        for less, more in pairwise(lives):
            assert all(a <= b for a, b in zip(less, more, strict=True)), name
