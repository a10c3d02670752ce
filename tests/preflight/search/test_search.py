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
from meshkit.preflight.search import min_max_partition, svg
from meshkit.preflight.search._goal import parse_goal
from meshkit.preflight.search._pricing import Pricing
from meshkit.preflight.search._search import Level, _World
from meshkit.preflight.search._space import Group
from meshkit.preflight.search.command import Search, _space, command
from meshkit.program import read_program
from meshkit.resolve import resolve, resolve_alike
from meshkit.step import next_token_loss

pytestmark = pytest.mark.turns(8)

RECIPE = Path(__file__).parents[3] / "examples" / "llama_pretrain.py"


def dense(**changes):
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512}
    with torch.device("meta"):
        return mk.models.Llama(mk.models.LlamaConfig(**(sizes | heads | changes)))


def moe():
    with torch.device("meta"):
        return mk.models.Mixtral(MOE)


def _moe_config():
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128}
    return mk.models.MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2)


MOE = _moe_config()
EXPERTS = mk.Strategy(plan=mk.models.model_plan(MOE))


SPACE = mk.Space(
    pp=(1, 2),
    tp=(1, 2),
    dp_replicate=(1,),
    microbatches=(2, 4),
    schedule=("1f1b", "zb-h1"),
    zero=(None,),
    sequence=(True,),
    recompute=("none", "full"),
)
FEWER = replace(SPACE, tp=(1,), microbatches=(4,), schedule=("1f1b",))  # of experts, which take longer
# Where launches and latencies cost nothing, the bound is within 10 % of small models' steps too: a wrong one shows.
FREE = {"device.launch_s": 0.0, "tiers.0.latency_s": 0.0, "tiers.1.latency_s": 0.0}
CLUSTER = mk.Cluster.read("h100").changed(**FREE)
BATCH = mk.Batch(sequences=64, seq_len=128)
SMALL = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4, "vocab_size": 256}


@pytest.mark.parametrize(
    ("make", "fixed", "space", "ranks"),
    [
        (dense, mk.Strategy(), SPACE, 16),
        (lambda: dense(tie_word_embeddings=True, num_hidden_layers=5), mk.Strategy(), SPACE, 16),
        (moe, mk.Strategy(), SPACE, 16),
        (moe, EXPERTS, FEWER, 8),
    ],
)
def test_bounds_cut_nothing_that_exhaustive_would_choose(make, fixed, space, ranks):
    model = make()
    every = mk.search(model, CLUSTER, BATCH, world=ranks, space=space, fixed=fixed, exhaustive=True)
    world = _World(Pricing(model, CLUSTER, BATCH, next_token_loss, "time"), ranks, 1, exhaustive=False, balance=True)
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
    pricing = Pricing(moe(), CLUSTER, BATCH, next_token_loss, "time")
    at_peak = pricing.peak(strategy).at_peak
    states = at_peak["parameters"] + at_peak["optimizer state"]
    elements, spec = pricing.elements(strategy), strategy.mesh_for()
    bound = 3 * 4 * elements.total / spec.dp_shard
    assert bound <= states
    assert bound > 0.9 * states  # tp may leave embeddings whole
    assert elements.experts.sum() == 3 * 4 * 3 * 128 * 256 / (spec.ep * spec.etp)


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


@pytest.mark.parametrize(
    ("mesh", "given", "axes"),
    [
        ("tp=1 dp_shard=-1", {"mesh"}, {"tp": (1,)}),
        ("pp=2,tp=1", {"mesh"}, {"pp": (2,), "tp": (1,)}),
        ("dp_shard=-1", set(), {}),
    ],
)
def test_an_axis_that_the_flag_says_is_1_stays_1(mesh, given, axes):
    asked = _space(Search(script=RECIPE, world=4), mk.Strategy(), given, mesh)
    assert asked == mk.Space(**axes)
    sizes = {each.tp for alike in asked.meshes(4, node=8, experts=0) for each in alike}
    assert sizes == ({1} if "tp" in axes else {1, 2, 4})


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
            mk.Space(tp=(1, 2), dp_replicate=(1,), schedule=("interleaved", "zbv"), recompute=("full",), balance=False),
        ),
        (64, mk.Space(pp=(1, 2, 8), tp=(1, 8), dp_replicate=(1, 2, 64), recompute=("none",), balance=False, rows=1)),
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
        pp=(1, 2), tp=(1, 2), microbatches=(1, 2, 4), schedule=("1f1b", "zb-h1"), recompute=("none", "full")
    )
    seen = 0
    for strategy in space.strategies(mk.Batch(sequences=64, seq_len=32), 8, mk.Strategy(), node=8, experts=0):
        spec = strategy.mesh_for()
        one, other = resolve(alone, strategy, spec), resolve_alike(shared, strategy, spec)
        assert (other.strategy, other.spec) == (strategy, spec)
        for name in ("plan", "blocks", "units", "mlps", "zero", "sequence", "compute", "head", "treatments", "whole"):
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
