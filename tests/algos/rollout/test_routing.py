"""Choices of routers that generation records are those of one device, and travel with their rollouts to who learns them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import meshkit as mk
from meshkit.algos.policy import GRPO, policy_batch, policy_count, policy_objective
from meshkit.algos.rollout import CachePolicy, Generation, KeptCache, Prompt, Rollout, generate, routed_values
from meshkit.core.sharding import local_tensor
from meshkit.models import Llama
from meshkit.moe import ROUTING
from tests.algos.policy.test_routing_replay import choosing
from tests.algos.rollout.test_generate import EXPERTS, PROMPTS, SAMPLING
from tests.laws.parity.cases import Cell, build, mesh_for, start
from tests.tiny import tiny_config
from tests.world import RankError, pool

TOL_FP64 = 1e-10
WRITERS = replace(EXPERTS, layers=3)
LOSS = replace(GRPO, kl=replace(GRPO.kl, coefficient=0.0))
LAYOUTS = [
    (1, WRITERS, CachePolicy(page_tokens=4)),
    (2, replace(WRITERS, mesh="dp_shard=2 ep=2"), CachePolicy(max_sequences=4)),
    (2, replace(WRITERS, mesh="tp=2", sequence=True), CachePolicy(page_tokens=4)),
    (2, replace(WRITERS, mesh="cp=2"), CachePolicy(page_tokens=1)),
    (2, replace(WRITERS, mesh="pp=2"), CachePolicy(prefill_tokens=8)),
]


def own_prompts(run: mk.Run) -> list[Prompt]:
    """All on the first data rank, so that others have none."""
    return PROMPTS if run.mesh.data_rank == 0 else []


def chosen_alone(cell: Cell, rollout: Rollout, scale: float = 1.0) -> np.ndarray:
    """[L, R, K]: by one device that reads prompt and answer at once; nothing at the last token."""
    model = build(cell)
    with torch.no_grad(), choosing(model, None) as chosen:
        for parameter in model.parameters():
            parameter.mul_(scale)
        model(torch.from_numpy(rollout.tokens)[None])
    routing = torch.stack(chosen, dim=1).numpy() + 1
    routing[-1] = 0
    return routing


def recorded(cell: Cell, cache: CachePolicy) -> int:
    """How many answers were compared with one device."""
    run = start(cell)
    found = generate(run, own_prompts(run), sampling=SAMPLING, samples=3, seed=5, cache=cache, routing=True)
    plain = generate(run, own_prompts(run), sampling=SAMPLING, samples=3, seed=5, cache=cache)
    for rollout, other in zip(found, plain, strict=True):
        assert rollout.ids.tolist() == other.ids.tolist() and other.routing is None
        assert rollout.routing.dtype == np.int16
        assert rollout.routing.tolist() == chosen_alone(cell, rollout).tolist()
    return len(found)


@pytest.mark.parametrize(("ranks", "cell", "cache"), LAYOUTS)
def test_generation_records_what_one_device_chooses(ranks: int, cell: Cell, cache: CachePolicy) -> None:
    assert pool(ranks).run(recorded, cell, cache)[0] == 3 * len(PROMPTS)


def recorded_by_a_kept_cache() -> None:
    """Prompts that begin as others' answers, in pages that were computed before, and some before anybody recorded."""
    run, cache = start(WRITERS), KeptCache(CachePolicy(page_tokens=4))
    first = generate(run, PROMPTS, sampling=SAMPLING, samples=2, seed=5, cache=cache, routing=True)
    again = [Prompt(ids=np.concatenate([each.tokens, [9, 2]]), key=index) for index, each in enumerate(first)]
    found = generate(run, again, sampling=SAMPLING, samples=2, seed=6, cache=cache, routing=True)
    assert cache.reused > 0
    for rollout in found:
        assert rollout.routing.tolist() == chosen_alone(WRITERS, rollout).tolist()
    generate(run, again, sampling=SAMPLING, samples=2, seed=7, cache=cache)
    for rollout in generate(run, again, sampling=SAMPLING, samples=2, seed=8, cache=cache, routing=True):
        expected = chosen_alone(WRITERS, rollout)
        known = (rollout.routing > 0).all((1, 2))
        # Of pages that were computed without a record nothing is known, and their tokens choose anew.
        assert not known.all() and (rollout.routing[known] == expected[known]).all()
        assert ((rollout.routing > 0).any((1, 2)) == known).all()


def test_a_kept_cache_keeps_choices() -> None:
    pool(1).run(recorded_by_a_kept_cache)


def recorded_across_weights() -> None:
    """Once weights have arrived, all tokens are computed anew, and so are their choices."""
    run = start(WRITERS)
    generation = Generation(run, sampling=SAMPLING, cache=CachePolicy(page_tokens=4), routing=True)
    generation.add(PROMPTS, seed=5)
    ended = generation.advance(4)
    with torch.no_grad():
        for parameter in run.model.parameters():
            local_tensor(parameter).mul_(1.1)
    generation.take_weights(1)
    later = generation.advance()
    assert later
    for rollouts, scale in ((ended, 1.0), (later, 1.1)):
        for rollout in rollouts:
            assert rollout.routing.tolist() == chosen_alone(WRITERS, rollout, scale).tolist()


def test_choices_are_those_of_the_weights_that_computed_the_cache() -> None:
    pool(1).run(recorded_across_weights)


def learnt_from(axes: str) -> tuple[float, float]:
    """How far a step that replays the generator's choices is from one that replays what the same weights choose then."""
    cell = replace(WRITERS, mesh=axes)
    run = start(cell)
    written = generate(run, own_prompts(run), sampling=SAMPLING, samples=4, seed=5, routing=True)
    written = [replace(each, reward=float(index % 3)) for index, each in enumerate(written)]
    found = []
    for routing in ("old", "rollout"):
        step = policy_batch(run, written, LOSS, tokens_per_microbatch=96, snapshot=True, routing=routing)
        assert step.batch[ROUTING].dtype == torch.int16 and step.batch[ROUTING].ndim == 4
        trained = start(cell)
        with torch.no_grad():
            for name, parameter in trained.named_parameters():
                local_tensor(parameter).mul_(1.5 if name.endswith("gate.weight") else 1.02)
        options = {"count": policy_count(LOSS), "microbatches": step.microbatches}
        loss = trained.forward_backward(step.batch, loss=policy_objective(run.mesh, step.batch, LOSS), **options)
        found.append((float(loss), [local_tensor(each.grad) for each in trained.parameters()]))
    (one, grads), (other, others) = found
    worst = max(float((a - b).abs().max()) for a, b in zip(grads, others, strict=True) if a.numel())
    return abs(one - other), worst


@pytest.mark.parametrize(("ranks", "axes"), [(1, ""), (2, "dp_shard=2"), (2, "pp=2"), (2, "cp=2")])
def test_choices_travel_with_rollouts(ranks: int, axes: str) -> None:
    for found in pool(ranks).run(learnt_from, axes):
        assert max(found) < TOL_FP64, found


def refused(what: str) -> None:
    if what == "dense":
        run = mk.parallelize(Llama(tiny_config()).double(), mesh_for("dp_shard=2"))
    else:
        run = start(replace(WRITERS, mesh="dp_shard=2"))
    prompts = [Prompt(ids=np.arange(3), key=0)] if run.mesh.data_rank else []
    written = generate(run, prompts, sampling=SAMPLING, routing=what == "dense")
    written = [replace(each, reward=0.0) for each in written]
    policy_batch(run, written, LOSS, tokens_per_microbatch=96, routing="rollout" if what == "nothing" else what)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("dense", "the model has no router of meshkit.models"),
        ("nothing", "'routing' is asked for, and the examples have no such value.*recorded by generate"),
        ("R2", "routing='R2' is not known. Choose from none, old, rollout"),
    ],
)
def test_what_was_not_recorded_is_refused(what: str, said: str) -> None:
    with pytest.raises(RankError, match=said) as error:
        pool(2).run(refused, what)
    assert all(f"rank {rank} of 2" in str(error.value) for rank in range(2))


def moved() -> list[bool]:
    """Choices of a batch, back where its examples came from."""
    run = start(replace(WRITERS, mesh="dp_shard=2"))
    written = generate(run, own_prompts(run), sampling=SAMPLING, samples=3, seed=5, routing=True)
    step = policy_batch(
        run, [replace(each, reward=0.0) for each in written], LOSS, tokens_per_microbatch=96, routing="rollout"
    )
    now = routed_values(run, step.batch, microbatches=step.microbatches).routing
    known = step.batch[ROUTING] > 0
    return [bool((now[known] == step.batch[ROUTING][known]).all()), bool(known.any())]


def test_choices_stand_at_their_tokens_on_the_rank_that_learns_them() -> None:
    assert pool(2).run(moved) == [[True, True]] * 2
