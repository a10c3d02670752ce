"""Search: bounds cut nothing that exhaustive forecasting would choose; what is proposed is legal and fits."""

from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.preflight.search import min_max_partition
from meshkit.preflight.search._pricing import Pricing
from meshkit.preflight.search._search import _World
from meshkit.preflight.search.command import command
from meshkit.step import next_token_loss

pytestmark = pytest.mark.turns(4)

RECIPE = Path(__file__).parents[3] / "examples" / "llama_pretrain.py"


def dense(**changes):
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512}
    with torch.device("meta"):
        return mk.models.Llama(mk.models.LlamaConfig(**(sizes | heads | changes)))


def moe():
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128}
    with torch.device("meta"):
        return mk.models.Mixtral(mk.models.MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2))


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
# Where launches and latencies cost nothing, the bound is within 10 % of small models' steps too: a wrong one shows.
FREE = {"device.launch_s": 0.0, "tiers.0.latency_s": 0.0, "tiers.1.latency_s": 0.0}
CLUSTER = mk.Cluster.read("h100").changed(**FREE)
BATCH = mk.Batch(sequences=64, seq_len=128)


@pytest.mark.parametrize("make", [dense, lambda: dense(tie_word_embeddings=True, num_hidden_layers=5), moe])
def test_bounds_cut_nothing_that_exhaustive_would_choose(make):
    model = make()
    every = mk.search(model, CLUSTER, BATCH, world=16, space=SPACE, exhaustive=True)
    world = _World(Pricing(model, CLUSTER, BATCH, next_token_loss, "time"), 16, 1, exhaustive=False, balance=True)
    world.add([each.strategy for each in every.tried])
    for each in every.tried:
        bounds = [world.mean_s(each.strategy), *(world.least_s(each.strategy, own=own) for own in (False, True))]
        assert max(bounds) <= each.seconds
        assert 0 < world.least_bytes(each.strategy) <= each.peak_bytes
    peaks = sorted(each.peak_bytes for each in every.tried)
    for memory in (None, peaks[len(peaks) // 3]):
        best = min(each.seconds for each in every.tried if each.fits(memory))
        found = mk.search(model, CLUSTER, BATCH, world=16, space=SPACE, device_memory=memory, recheck=False)
        assert found.winner is not None
        assert found.winner.seconds == best
        assert found.winner.fits(memory)
        assert len(found.tried) <= len(every.tried)
        assert found.neighbours
        assert found.flags in str(found)


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


def test_what_is_fixed_stays():
    fixed = mk.Strategy(mesh="tp=2", memory=mk.MemoryPolicy(recompute="full"))
    found = mk.search(dense(), "h100", BATCH, world=8, space=SPACE, fixed=fixed, recheck=False)
    assert {each.strategy.mesh.tp for each in found.tried} == {2}
    assert {each.strategy.memory.recompute for each in found.tried} == {found.best.memory.recompute}


def test_the_command_prints_flags_and_writes_the_winner(tmp_path, capsys):
    out = tmp_path / "strategy.toml"
    args = [str(RECIPE), "--world", "4", "--cluster", "cpu", "--recompute", "none", "--schedules", "1f1b"]
    command([*args, "--global-batch", "8", "--seq-len", "64", "--out", str(out)])
    said = capsys.readouterr().out
    assert "--mesh" in said
    assert "priced" in said
    best = mk.Strategy.read(out)
    assert best.mesh_for().world_size == 4
    assert best.memory.recompute == "none"
