"""Search: bounds cut nothing that exhaustive forecasting would choose; what is proposed is legal and fits."""

from itertools import combinations

import pytest
import torch

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.preflight.search import min_max_partition

GIB = 2**30


def dense(**changes):
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512}
    with torch.device("meta"):
        return mk.models.Llama(mk.models.LlamaConfig(**(sizes | heads | changes)))


MODELS = {"dense": {}, "tied": {"tie_word_embeddings": True, "num_hidden_layers": 5}}
SPACE = mk.Space(pp=(1, 2, 4), tp=(1, 2), dp_replicate=(1,), microbatches=(2, 4), schedule=("1f1b", "zb-h1"))
BATCH = mk.Batch(sequences=64, seq_len=512)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("room", [None, 0.35])
def test_bounds_cut_nothing_that_exhaustive_would_choose(name, room):
    model = dense(**MODELS[name])
    every = mk.search(model, "h100", BATCH, world=16, space=SPACE, exhaustive=True, recheck=False)
    peaks = sorted(each.peak_bytes for each in every.tried)
    memory = None if room is None else peaks[int(room * len(peaks))]
    best = min((each.seconds for each in every.tried if memory is None or each.peak_bytes <= memory))
    found = mk.search(model, "h100", BATCH, world=16, space=SPACE, device_memory=memory, recheck=False)
    assert found.winner is not None
    assert found.winner.seconds == best
    assert len(found.tried) < len(every.tried)
    assert found.winner.fits(memory)
    if memory is not None:
        assert found.unfit
    assert found.neighbours
    assert str(found)


def test_partition_is_the_least_of_all():
    seconds = [1.0, 4.0, 2.0, 2.0, 3.0, 1.0, 5.0]

    def slowest(counts, first=0.5, last=2.5):
        ends = [sum(counts[:at]) for at in range(len(counts) + 1)]
        own = [sum(seconds[a:b]) for a, b in zip(ends, ends[1:])]
        own[0] += first
        own[-1] += last
        return max(own)

    for stages in range(1, 8):
        cuts = combinations(range(1, 7), stages - 1)
        every = [tuple(b - a for a, b in zip((0, *cut), (*cut, 7))) for cut in cuts]
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
