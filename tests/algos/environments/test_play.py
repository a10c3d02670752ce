"""Episodes: masks, rewards and log-probabilities of several turns are those of one whole forward, on every mesh."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import meshkit as mk
from meshkit.algos.environments import Action, Environment, EnvironmentPool, Observation, Player, episode_scores
from meshkit.algos.policy import GRPO, policy_batch, policy_count, policy_metrics, policy_objective, policy_sums
from meshkit.algos.rewards import Unscored, score_on_mesh
from meshkit.algos.rollout import CachePolicy, KeptCache, Prompt, Rollout, Sampling, generate
from meshkit.core.rng import stream_of
from meshkit.errors import DataError
from tests.algos.rollout.test_generate import EXPERTS, PLAIN, TOL_FP64, VOCABULARY, log_probs_of_training
from tests.laws.parity.cases import Cell, start
from tests.world import pool

SAMPLING = Sampling(max_new_tokens=3, temperature=0.9, stop_ids=(4, 11))
PROMPTS = [Prompt(ids=np.arange(2, 2 + n) * 7 % VOCABULARY, key=70 + n, fields={"secret": n}) for n in (3, 1, 9, 5, 2)]
TURNS = 5


class Echo:
    """Says tokens that depend on all that was done and on the row; some episodes are done earlier than others."""

    def reset(self, fields: Mapping[str, Any], seed: int) -> Observation:
        self.secret, self.sum, self.turns = fields["secret"], seed % 5, 0
        return Observation(ids=tuple(range(20, 20 + self.secret % 3)))

    def step(self, action: Action) -> Observation:
        self.turns += 1
        self.sum += int(action.ids.sum()) * self.turns
        ids = tuple((self.sum + index) % VOCABULARY for index in range(1 + self.sum % 2))
        return Observation(ids=ids, reward=self.sum % 7 - 3, done=self.sum % 5 == 0)


class AsyncEcho(Echo):
    async def step(self, action: Action) -> Observation:  # type: ignore[override]
        await asyncio.sleep(0.001)
        return Echo.step(self, action)


def ids_of(text: str) -> list[int]:
    return [ord(letter) % VOCABULARY for letter in text]


def player(run: mk.Run, environment: Any = Echo, **options: Any) -> Player:
    engine = partial(generate, run, cache=options.pop("cache", CachePolicy(page_tokens=4)))
    options = {"turns": TURNS, **options}
    return Player(mesh=run.mesh, engine=engine, environment=environment, encode=ids_of, **options)


Told = dict[tuple[int, int], tuple[list[int], list[int], list[bool], list[float], bool]]


def told(rollouts: list[Rollout], samples: int) -> Told:
    return {
        (each.key, index % samples): (
            each.prompt_ids.tolist(),
            each.ids.tolist(),
            each.wrote.tolist(),
            each.reward.tolist(),
            each.truncated,
        )
        for index, each in enumerate(rollouts)
    }


def played(cell: Cell, environment: Any, groups: int) -> tuple[Told, float, bool]:
    """(episodes of this data rank, their gap to training, whether what the environment said is what it says alone)."""
    run = start(cell)
    busy = max(1, run.mesh.data_ranks - (run.mesh.data_ranks > 2))
    own = PROMPTS[run.mesh.data_rank :: busy] if run.mesh.data_rank < busy else []
    kept = KeptCache(CachePolicy(page_tokens=4))
    found = player(run, environment, groups=groups, cache=kept)(own, sampling=SAMPLING, samples=2, seed=3)
    trained = log_probs_of_training(run, found, SAMPLING.temperature)
    gaps = [np.abs(each.log_probs - t)[each.wrote].max() for each, t in zip(found, trained, strict=True)]
    return told(found, 2), float(max(gaps, default=0.0)), all(replayed(each) for each in found)


def replayed(rollout: Rollout) -> bool:
    """A plain loop over the turns of the rollout: an environment alone says the same and gives the same rewards."""
    runs = np.split(np.arange(len(rollout.ids)), np.flatnonzero(np.diff(rollout.wrote.astype(int))) + 1)
    rewards, done, ids = np.zeros(len(rollout.ids)), False, ()
    first = Echo()
    beginning = first.reset(rollout.fields, stream_of("environment", 3, rollout.key))
    right = tuple(rollout.prompt_ids[len(rollout.prompt_ids) - len(beginning.ids) :]) == beginning.ids
    for part in runs:
        if rollout.wrote[part[0]]:
            right &= not done and len(part) <= 3
            said = first.step(Action(ids=rollout.ids[part], text=""))
            rewards[part[-1]], done, ids = said.reward, said.done, said.ids
        else:
            right &= tuple(rollout.ids[part]) == ids
    return bool(right and rollout.wrote[-1] and (rewards == rollout.reward).all() and rollout.truncated == (not done))


LAYOUTS = [
    (1, PLAIN, Echo, 1),
    (1, PLAIN, Echo, 3),
    (1, PLAIN, AsyncEcho, 2),
    (2, replace(PLAIN, mesh="dp_shard=2"), Echo, 2),
    (2, replace(PLAIN, mesh="tp=2"), Echo, 2),
    (2, replace(PLAIN, mesh="pp=2"), AsyncEcho, 2),
    (2, replace(PLAIN, mesh="cp=2"), Echo, 1),
    (4, replace(PLAIN, mesh="dp_shard=4"), Echo, 2),  # the last rank has no prompt
    (4, replace(PLAIN, mesh="dp_replicate=2 tp=2"), Echo, 2),
    (4, replace(EXPERTS, mesh="dp_shard=4 ep=2"), Echo, 2),
]


@pytest.mark.parametrize(
    ("world", "cell", "environment", "groups"), LAYOUTS, ids=[f"{c.mesh}-{i}" for i, (_, c, *_) in enumerate(LAYOUTS)]
)
def test_episodes_are_those_of_one_device_and_a_plain_loop(
    world: int, cell: Cell, environment: Any, groups: int
) -> None:
    ((expected, gap, right),) = pool(1).run(played, replace(cell, mesh=""), Echo, 1)
    assert gap <= TOL_FP64 and right
    lengths = {sum(np.diff([False, *wrote]) & wrote) for _, _, wrote, _, _ in expected.values()}
    assert len(lengths) > 2 and TURNS in lengths, lengths  # episodes of several lengths
    seen: Told = {}
    for found, gap, right in pool(world).run(played, cell, environment, groups):
        assert gap <= TOL_FP64 and right
        seen |= found
    assert seen == expected


def learnt_step(cell: Cell) -> tuple[float, float, dict[str, float]]:
    """A step of GRPO on episodes: its loss, gradient norm and metrics."""
    run = start(cell)
    own = PROMPTS[run.mesh.data_rank :: run.mesh.data_ranks]
    rollouts = player(run, cache=KeptCache())(own, sampling=SAMPLING, samples=4, seed=3)
    scored = score_on_mesh(run.mesh, rollouts, episode_scores)
    loss = replace(GRPO, kl=replace(GRPO.kl, coefficient=0.0))
    step = policy_batch(run, scored.rollouts, loss, tokens_per_microbatch=64, temperature=0.9, snapshot=True)
    sums = policy_sums(run.mesh)
    objective = policy_objective(run.mesh, step.batch, loss, temperature=0.9, metrics=sums)
    value = run.forward_backward(step.batch, loss=objective, count=policy_count(loss), microbatches=step.microbatches)
    return float(value), float(mk.clip_grad_norm(run, 1.0)), policy_metrics(sums)


def test_a_step_on_episodes_is_the_same_on_every_mesh_and_generator_and_trainer_agree() -> None:
    """The mask goes through log-probabilities, the loss and the metrics: the environment's tokens are in none."""
    ((value, norm, metrics),) = pool(1).run(learnt_step, PLAIN)
    assert metrics["rollout_gap_max"] <= TOL_FP64 and abs(metrics["ratio_max"] - 1) <= TOL_FP64
    assert norm > 0
    for world, mesh in ((2, "dp_shard=2"), (2, "tp=2"), (2, "cp=2"), (2, "pp=2")):
        for own in pool(world).run(learnt_step, replace(PLAIN, mesh=mesh)):
            assert own[:2] == pytest.approx((value, norm), rel=1e-9), mesh
            assert own[2] == pytest.approx(metrics, rel=1e-9, abs=1e-12), mesh


class Odd(Echo):
    """Fails in the way of its row."""

    def step(self, action: Action) -> Observation:
        match self.secret:
            case 3:
                raise ValueError("no such door")
            case 1:
                return Observation()  # nothing to read
            case 9:
                time.sleep(60)
            case 5:
                os._exit(7)
        return super().step(action)


class OneRank:
    """In place of a mesh: workers are processes of this one, and ranks of the pool may have none."""

    data_ranks = 1

    def __getitem__(self, axis: str) -> OneRank:
        return self

    def size(self) -> int:
        return 1

    def get_local_rank(self) -> int:
        return 0


def two_tokens(prompts: list[Prompt], *, samples: int, **options: Any) -> list[Rollout]:
    ids, log_probs = np.array([8, 4]), np.zeros(2)
    return [Rollout(ids=ids, log_probs=log_probs, key=each.key) for each in prompts for _ in range(samples)]


def failures(workers: int, prompts: list[Prompt]) -> dict[int, tuple[str, bool]]:
    """By the row: why the episode has no score, and whether its reward says so."""
    steps = EnvironmentPool(workers=workers, timeout_s=2.0)
    one: Any = OneRank()
    options: Any = {"environment": Odd, "pool": steps, "turns": TURNS, "encode": ids_of}
    found = Player(mesh=one, engine=two_tokens, **options)(prompts, sampling=SAMPLING)
    steps.close()
    values = episode_scores(found).values
    return {
        each.key - 70: (
            f"{value.kind}: {value.text}" if isinstance(value, Unscored) else "",
            bool(np.isnan(np.sum(each.reward))),
        )
        for each, value in zip(found, values, strict=True)
    }


def test_an_episode_that_fails_has_no_reward_and_says_why() -> None:
    found = failures(2, PROMPTS)
    assert found[3] == ("raised: Odd: ValueError: no such door", True)
    assert found[1] == ("raised: Odd: neither done nor anything to read. Return text, or ids", True)
    assert found[9] == ("timed out: Odd: no step within 2.0 s", True)
    assert found[5] == ("raised: Odd: the worker died with exit code 7", True)
    assert found[2] == ("", False)
    harmless = [each for each in PROMPTS if each.fields["secret"] not in (9, 5)]
    assert failures(0, harmless) == {key: found[key] for key in (3, 1, 2)}


class Once(Echo):
    def step(self, action: Action) -> Observation:
        return Observation(reward=1.0, done=True)


def of_one_turn() -> bool:
    run = start(PLAIN)
    alone = generate(run, PROMPTS[3:4], sampling=SAMPLING, samples=3, seed=8)
    class_of_row = partial(player, run, Once)
    found = class_of_row()([replace(PROMPTS[3], fields={"secret": 3})], sampling=SAMPLING, samples=3, seed=8)
    return [each.ids.tolist() for each in alone] == [each.ids.tolist() for each in found]


def test_an_episode_of_one_turn_is_what_generate_writes() -> None:
    assert pool(1).run(of_one_turn) == [True]


def bounded(most: int) -> list[tuple[int, bool]]:
    run = start(PLAIN)
    found = player(run, max_tokens=most)(PROMPTS, sampling=SAMPLING, samples=2, seed=3)
    return [(len(each.tokens), each.truncated) for each in found]


def test_no_episode_is_longer_than_max_tokens() -> None:
    (free,) = pool(1).run(bounded, 1000)
    (cut,) = pool(1).run(bounded, 20)
    assert max(length for length, _ in free) > 20 >= max(length for length, _ in cut)
    assert sum(truncated for _, truncated in cut) > sum(truncated for _, truncated in free)


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(DataError, match=r"Player\(groups=0\): it must be at least 1"):
        Player(mesh=None, engine=None, environment=Echo, encode=ids_of, turns=1, groups=0)  # type: ignore[arg-type]


def test_the_protocol_is_what_environments_have() -> None:
    environment: Environment = Echo()
    assert isinstance(environment.reset({"secret": 1}, 0), Observation)
