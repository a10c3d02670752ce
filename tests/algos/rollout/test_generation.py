"""`Generation`: held between any two tokens it writes what `generate` writes; weights that arrive there go on with it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import meshkit as mk
from meshkit.algos.rollout import CachePolicy, Generation, KeptCache, Prompt, Rollout, Sampling, _answers, generate
from meshkit.core.sharding import local_tensor
from meshkit.errors import AgreementError, DataError
from tests.algos.rollout.test_generate import (
    EXPERTS,
    PLAIN,
    PROMPTS,
    SAMPLING,
    TOL_FP64,
    answers,
    log_probs_of_training,
)
from tests.laws.parity.cases import Cell, start
from tests.models.families import transformers_model
from tests.world import pool

SAMPLES = 3
UPDATES = (2, 1, 4)
"""tokens after which weights arrive"""
LAYOUTS = [
    (1, PLAIN, CachePolicy(page_tokens=4)),
    (2, replace(PLAIN, mesh="dp_shard=2"), CachePolicy(page_tokens=4, max_sequences=4)),
    (2, replace(PLAIN, mesh="dp_shard=2"), CachePolicy(keep_parameters=False)),
    (2, replace(PLAIN, mesh="tp=2", sequence=True), CachePolicy(page_tokens=4, max_tokens=120)),
    (2, replace(PLAIN, mesh="pp=2"), CachePolicy(prefill_tokens=8)),
    (4, replace(EXPERTS, mesh="dp_shard=2 tp=2"), CachePolicy()),
]


def update(run: mk.Run, version: int) -> None:
    """Weights of a version, the same on every mesh, written into the shards that are there."""
    with torch.no_grad():
        for parameter in run.model.parameters():
            local_tensor(parameter).mul_(1 + 0.02 * version)


def rewind(run: mk.Run, versions: int) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            for version in range(1, versions + 1):
                local_tensor(parameter).div_(1 + 0.02 * version)


def own_prompts(run: mk.Run) -> list[Prompt]:
    """All on the first of two data ranks, so that the other has none."""
    return PROMPTS if run.mesh.data_rank == 0 else []


def streamed(cell: Cell, cache: CachePolicy) -> tuple[list[Any], list[Any], float, list[list[int]]]:
    """(held after each token, at once, how far each token is from what its version gives in training, the versions)."""
    run = start(cell)
    prompts = own_prompts(run)
    at_once = generate(run, prompts, sampling=SAMPLING, samples=SAMPLES, seed=5, cache=cache)

    held = Generation(run, sampling=SAMPLING, cache=cache)
    held.add(prompts[:2], samples=SAMPLES, seed=5)
    ended = held.advance(1)
    held.add(prompts[2:], samples=SAMPLES, seed=5)
    for _ in range(200):
        ended += held.advance(1)
    assert held.done and not held.growing

    changing = Generation(run, sampling=SAMPLING, cache=cache)
    changing.add(prompts, samples=SAMPLES, seed=7)
    found = []
    for version, tokens in enumerate(UPDATES, 1):
        found += changing.advance(tokens)
        update(run, version)
        changing.take_weights(version)
    found += changing.advance()
    rewind(run, len(UPDATES))
    worst = 0.0
    for version in range(len(UPDATES) + 1):
        if version:
            update(run, version)
        for rollout, values in zip(found, log_probs_of_training(run, found, SAMPLING.temperature), strict=True):
            off = np.abs(rollout.log_probs - values)[rollout.versions == version]
            worst = max(worst, off.max(initial=0.0))
    return by_answer(ended), by_answer(at_once), worst, [rollout.versions.tolist() for rollout in found]


def by_answer(rollouts: list[Rollout]) -> list[Any]:
    return sorted(answers(rollouts))


@pytest.mark.parametrize(("world", "cell", "cache"), LAYOUTS)
def test_answers_held_between_tokens_are_those_of_one_call_and_each_token_is_its_versions(
    world: int, cell: Cell, cache: CachePolicy
) -> None:
    several = False
    for held, at_once, worst, versions in pool(world).run(streamed, cell, cache):
        assert len(held) == len(at_once)
        for one, other in zip(held, at_once, strict=True):
            assert one[:2] == other[:2] and one[3] == other[3]
            assert np.abs(np.array(one[2]) - np.array(other[2])).max() <= TOL_FP64
        assert worst <= TOL_FP64
        assert all(of_answer == sorted(of_answer) for of_answer in versions)
        several = several or any(len(set(of_answer)) > 2 for of_answer in versions)
    assert several


def continued(first: Cell, then: Cell, stop: int) -> tuple[list[Any], list[Any]]:
    """(of a generation that went on elsewhere, of one call), each of all data ranks."""
    run = start(first)
    generation = Generation(run, sampling=SAMPLING, version=6)
    generation.add(PROMPTS[run.mesh.data_rank :: run.mesh.data_ranks], samples=SAMPLES, seed=5)
    ended = generation.advance(stop)
    states = mk.mesh.gather_over_data(run.mesh, generation.state_dict()["answers"])
    pending = [answer for of_rank in states for answer in of_rank]
    assert pending and all(len(answer["ids"]) == stop for answer in pending)
    before = [rollout for of_rank in mk.mesh.gather_over_data(run.mesh, ended) for rollout in of_rank]

    run = start(then)
    generation = Generation(run, sampling=SAMPLING)
    keys = sorted({answer["key"] for answer in pending})[run.mesh.data_rank :: run.mesh.data_ranks]
    mine = [answer for answer in pending if answer["key"] in keys]
    generation.load_state_dict({"version": 6, "answers": mine})
    after = [rollout for of_rank in mk.mesh.gather_over_data(run.mesh, generation.advance()) for rollout in of_rank]
    assert all((rollout.versions == 6).all() for rollout in [*before, *after])
    expected = generate(run, PROMPTS, sampling=SAMPLING, samples=SAMPLES, seed=5)
    return by_answer([*before, *after]), by_answer(expected)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (replace(PLAIN, mesh="dp_shard=2"), replace(PLAIN, mesh="tp=2")),
        (replace(PLAIN, mesh="tp=2"), replace(PLAIN, mesh="dp_replicate=2")),
    ],
)
def test_a_generation_goes_on_on_another_mesh(first: Cell, then: Cell) -> None:
    for found, expected in pool(2).run(continued, first, then, 3):
        assert len(found) == len(expected) == SAMPLES * len(PROMPTS)
        for one, other in zip(found, expected, strict=True):
            assert one[:2] == other[:2] and one[3] == other[3]
            assert np.abs(np.array(one[2]) - np.array(other[2])).max() <= TOL_FP64


class Counted(nn.Module):
    """A model without a mask and without a cache: whole rows are computed for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 16), nn.Linear(16, 61, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(input_ids).cumsum(1).tanh())
        return logits


def over_rows(kind: str) -> tuple[list[Any], list[Any], float]:
    torch.manual_seed(0)
    model = transformers_model("llama3") if kind == "cached" else Counted()
    run = mk.parallelize(model.double(), mk.init_mesh(""))
    sampling = Sampling(max_new_tokens=9, stop_ids=(4, 11))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "generate: Counted computes whole rows")
        at_once = generate(run, PROMPTS, sampling=sampling, samples=2, seed=5)
    held = Generation(run, sampling=sampling)
    held.add(PROMPTS, samples=2, seed=5)
    ended = []
    while not held.done:
        ended += held.advance(1)
    changing = Generation(run, sampling=sampling)
    changing.add(PROMPTS, samples=2, seed=5)
    early = changing.advance(4)
    update(run, 3)
    changing.take_weights(1)
    late = changing.advance()
    worst = 0.0
    for rollout in late:
        with torch.no_grad():
            output = run.model(torch.from_numpy(rollout.tokens).unsqueeze(0))
        logits = getattr(output, "logits", output)[0, len(rollout.prompt_ids) - 1 : -1]
        values = logits.log_softmax(-1).gather(1, torch.from_numpy(rollout.ids).unsqueeze(1)).squeeze(1).numpy()
        new = rollout.versions == 1
        assert new.sum() == max(0, len(rollout.ids) - 4) > 0
        worst = max(worst, np.abs(rollout.log_probs - values)[new].max())
    assert len(early) + len(late) == 2 * len(PROMPTS)
    return by_answer(ended), by_answer(at_once), worst


@pytest.mark.parametrize("kind", ["cached", "whole"])
def test_models_without_a_paged_cache_are_held_and_take_weights_as_well(kind: str) -> None:
    ((held, at_once, worst),) = pool(1).run(over_rows, kind)
    assert [(one[0], one[1]) for one in held] == [(one[0], one[1]) for one in at_once]
    assert worst <= TOL_FP64


def refused() -> tuple[str, str]:
    run = start(replace(PLAIN, mesh="dp_shard=2"))
    generation = Generation(run, sampling=SAMPLING, version=3)
    with pytest.raises(DataError) as back:
        generation.take_weights(3)
    with pytest.raises(AgreementError) as apart:
        generation.add(PROMPTS, samples=1 + run.mesh.data_rank)
    return str(back.value), str(apart.value)


def test_versions_count_upwards_and_ranks_agree_on_what_is_asked() -> None:
    for back, apart in pool(2).run(refused):
        assert back.startswith("take_weights(version=3): there is 3 already.")
        assert "samples" in apart


class Remembers(nn.Module):
    """A layer of somebody else, which makes a table at its first forward and multiplies with it ever after."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.full((x.shape[-1],), 1.0, dtype=x.dtype) * 1.0
        return x * self.table


def trains_after(kind: str) -> tuple[bool, bool]:
    """(whether generation ran in inference mode, whether a step after it gave gradients)."""
    run, seen = start(PLAIN), list[torch.Tensor]()
    if kind == "module":
        run.model.layers[0].mlp.act = Remembers()
        down = run.model.layers[0].mlp.down_proj
        run.model.layers[0].mlp.down_proj = nn.Sequential(run.model.layers[0].mlp.act, down)
    elif kind == "hook":
        run.model.layers[0].register_forward_hook(lambda module, args, out: seen.append(out))
    kept, modes, choose = KeptCache(), list[bool](), _answers.choose

    def noted(*given: Any) -> Any:
        modes.append(torch.is_inference_mode_enabled())
        return choose(*given)

    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_answers, "choose", noted)
            prompts = [Prompt(ids=np.array([3, 5]), key=0)]
            generate(run, prompts, sampling=Sampling(max_new_tokens=3), cache=kept)
        handle = run.model.norm.register_forward_hook(
            lambda module, args, out: None
        )  # the next call is without the mode
    handle.remove()
    ids = torch.tensor([[3, 5, 7, 9]])
    run.model.zero_grad()
    loss = run.model(ids).square().sum() + sum(each.sum() for each in seen)
    loss.backward()
    return modes[0], all(each.grad is not None for each in run.model.parameters())


@pytest.mark.parametrize(("kind", "mode"), [("plain", True), ("module", False), ("hook", False)])
def test_a_step_after_generation_has_gradients_whatever_modules_and_hooks_keep(kind: str, mode: bool) -> None:
    ((inference, trained),) = pool(1).run(trains_after, kind)
    assert inference == mode and trained


def after_a_step_that_raised() -> tuple[str, bool]:
    run = start(PLAIN)
    at_once = generate(run, PROMPTS[:2], sampling=SAMPLING, samples=2, seed=5)
    held = Generation(run, sampling=SAMPLING)
    held.add(PROMPTS[:2], samples=2, seed=5)
    ended = held.advance(2)
    state = held.state_dict()

    def fails(*_: object) -> None:
        raise MemoryError

    hook = run.model.register_forward_pre_hook(fails)
    with pytest.raises(MemoryError):
        held.advance()
    hook.remove()
    with pytest.raises(DataError) as said:
        held.advance()
    again = Generation(run, sampling=SAMPLING)
    again.load_state_dict(state)
    ended += again.advance()
    found, expected = (sorted((each.key, each.ids.tolist()) for each in of) for of in (ended, at_once))
    return str(said.value), found == expected


def test_after_a_step_that_raised_nothing_is_written_over_half_a_cache() -> None:
    said, equal = pool(1).run(after_a_step_that_raised)[0]
    assert "an earlier call ended in the middle of a step, with MemoryError" in said
    assert equal


@pytest.mark.parametrize("change", [{"max_new_tokens": 2.5}, {"max_new_tokens": 8, "top_k": 2.5}])
def test_counts_of_tokens_are_whole(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="a whole number of at least 1"):
        Sampling(**change)
