"""`generate` for models without a `mask`: over the cache of transformers' modules, or of whole rows, as training does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import cache_utils

import meshkit as mk
from meshkit.algos.rollout import CachePolicy, Prompt, Rollout, Sampling, generate, label_log_probs, token_values
from meshkit.algos.rollout._answers import Answer
from meshkit.algos.rollout._batches import batches
from tests.world import pool
from tests.zoo import causal, generated, judge
from tests.zoo.case import Cell
from tests.zoo.decoders import Plain
from tests.zoo.exact import exact
from tests.zoo.sweep import verdict

TOL_FP64 = 1e-9  # only the order of summation differs
CELLS = {
    ("llama", "dp_shard=1, generate"): "cache; as transformers' generate",
    ("gemma2", "tp=2, generate"): "cache",  # windows shorter than a prompt
    ("jamba", "dp_shard=1, generate"): "cache; as transformers' generate",  # states of two kinds
    ("mamba", "dp_shard=2, generate"): "cache, rows of one length",
    ("mixtral", "dp_shard=2 ep=2, generate"): "cache",
    ("bloom", "dp_shard=1, generate"): "cache; as transformers' generate",  # positions by the mask
    ("roberta", "dp_shard=1, generate"): "cache, rows of one length; transformers' generate is not its own forward",
    (
        "openai-gpt",
        "tp=2, generate",
    ): "whole rows: log-probabilities|whole rows: its forward takes no|whole rows: its own cache",
    ("gpt2", "pp=2, generate"): "whole rows: its own cache is used on dp, tp and ep alone, and here is pp=2",
    ("qwen2", "cp=2, generate"): "whole rows: its own cache is used on dp, tp and ep alone, and here is cp=2",
    (
        "llama",
        "tp=2, sequence, generate",
    ): "whole rows: its own cache is used on dp, tp and ep alone, and here is sequence",
}


@pytest.mark.parametrize(("model", "column"), [pytest.param(*each, id=" on ".join(each)) for each in CELLS])
def test_greedy_answers_and_log_probabilities_are_those_of_the_forward_without_a_cache(model: str, column: str) -> None:
    row = verdict(Cell.of(model, column))
    assert row.outcome == "equal", f"{row.text}\n{row.traceback}"
    assert row.text.startswith(tuple(CELLS[model, column].split("|")))


@pytest.mark.parametrize("model", ["xlnet", "cpmant"])
def test_a_model_that_sees_what_follows_is_refused(model: str) -> None:
    row = verdict(Cell.of(model, "dp_shard=1, generate"))
    assert row.outcome == "refused"
    assert "is not causal: what follows a token changes its log-probabilities" in row.text


# --------------------------------------------------------------------------------------------- drawn answers, on meshes

PROMPTS = [Prompt(ids=np.arange(3, 3 + length) * 7 % 70 + 5, key=100 + length) for length in (5, 1, 16, 9, 5)]
SAMPLING = Sampling(max_new_tokens=12, temperature=0.7, top_p=0.95, stop_ids=tuple(range(8)))
Answers = list[tuple[int, list[int], list[float], bool]]


def drawn(mesh: str, cache: CachePolicy, kind: str) -> tuple[Answers, float]:
    """This data rank's answers, and how far their log-probabilities are from the trainer's. The last rank has no prompts."""
    with judge.quiet(), exact():
        run = mk.parallelize(generated.build(kind), mk.init_mesh(mesh))
        busy = max(1, run.mesh.data_ranks - 1)
        own = PROMPTS[run.mesh.data_rank :: busy] if run.mesh.data_rank < busy else []
        found = generate(run, own, sampling=SAMPLING, samples=3, seed=5, cache=cache)
        assert run.model.training
        off = off_training(run, found)
    return [(each.key, each.ids.tolist(), each.log_probs.tolist(), each.truncated) for each in found], off


def off_training(run: mk.Run, found: list[Rollout]) -> float:
    """By `token_values`, which the policy losses use; every answer's row with padding behind it."""
    ids = torch.zeros(max(1, len(found)), 33, dtype=torch.int64)
    labels = torch.full((max(1, len(found)), 32), -100)
    for index, each in enumerate(found):
        ids[index, : len(each.tokens)] = torch.from_numpy(each.tokens)
        labels[index, len(each.prompt_ids) - 1 : len(each.tokens) - 1] = torch.from_numpy(each.ids)
    values = token_values(
        run, {"input_ids": ids[:, :-1], "labels": labels}, partial(label_log_probs, temperature=SAMPLING.temperature)
    )
    return max(
        (
            float((values[index][labels[index] != -100].cpu() - torch.from_numpy(each.log_probs)).abs().max())
            for index, each in enumerate(found)
        ),
        default=0.0,
    )


LAYOUTS = [
    (1, "", CachePolicy(max_sequences=2), "llama"),  # the samples of a prompt do not fit together
    (1, "", CachePolicy(max_tokens=60), "llama"),
    (2, "dp_shard=2", CachePolicy(), "llama"),
    (2, "dp_shard=2", CachePolicy(keep_parameters=False, prefill_tokens=1), "llama"),
    (2, "tp=2", CachePolicy(), "llama"),
    (2, "dp_shard=2 ep=2", CachePolicy(max_sequences=4), "qwen2_moe"),
    (2, "pp=2", CachePolicy(), "llama"),
    (4, "dp_shard=2 tp=2", CachePolicy(), "qwen2_moe"),
]


@pytest.mark.parametrize(
    ("world", "mesh", "cache", "kind"),
    LAYOUTS,
    ids=[f"{m.replace(' ', ',')}-{i}" for i, (_, m, *_) in enumerate(LAYOUTS)],
)
def test_drawn_answers_are_those_of_one_device(world: int, mesh: str, cache: CachePolicy, kind: str) -> None:
    ((expected, off),) = pool(1).run(drawn, "", CachePolicy(), kind)
    assert off <= TOL_FP64
    assert {truncated for *_, truncated in expected} == {False, True}
    seen: set[int] = set()
    for found, off in pool(world).run(drawn, mesh, cache, kind):
        assert off <= TOL_FP64
        seen |= {each[0] for each in found}
        for own, one in zip(found, [each for each in expected if each[0] in {own[0] for own in found}], strict=True):
            assert own[:2] == one[:2] and own[3] == one[3]
            assert np.abs(np.array(own[2]) - np.array(one[2])).max() <= TOL_FP64
    assert seen == {prompt.key for prompt in PROMPTS}


# ------------------------------------------------------------------------------------------------ caches that are wrong


@contextmanager
def keeps_only(tokens: int) -> Iterator[None]:
    """A cache of transformers that forgets what is older, in a layer that attends to all."""
    whole = cache_utils.DynamicLayer.update

    def update(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = whole(self, keys, values, *args, **kwargs)
        lost = max(0, keys.shape[2] - tokens)
        if lost:
            keys, values = (F.pad(each[:, :, lost:], (0, 0, lost, 0)) for each in (keys, values))
        return keys, values

    with mock.patch.object(cache_utils.DynamicLayer, "update", update):
        yield


def over_a_wrong_cache(tokens: int) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """(answers of a cache that keeps so many tokens, of whole rows, warnings) of two calls."""
    with judge.quiet(), exact():
        expected, sampling = generated.alone("llama", 12), Sampling(max_new_tokens=12, temperature=0)
        model = generated.build("llama")
        model.config.use_cache = False  # whole rows are computed without
        run = mk.parallelize(model, mk.init_mesh(""))
        with keeps_only(tokens), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                found = generate(run, generated.prompts(), sampling=sampling)
    return [each.ids.tolist() for each in found], expected.ids, [str(each.message) for each in said]


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        (8, "since log-probabilities over its own cache are off"),
        (19, "since an answer's log-probabilities over its own"),
    ],
)
def test_a_cache_that_is_not_what_training_computes_is_not_used(tokens: int, why: str) -> None:
    """Of 8 tokens a trial sees it; of 19, which a trial has, the longest answer does."""
    ((found, expected, warned),) = pool(1).run(over_a_wrong_cache, tokens)
    assert found == expected
    (text,) = warned
    assert text.startswith("generate: LlamaForCausalLM computes whole rows for each token, " + why)


class Leaky(Plain):
    """The mean of the whole row goes into every token."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + x.mean(1, keepdim=True))


class Fixed(Plain):
    """Rows of 16 tokens and no others."""

    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids.reshape(-1, 16))


def of_plain_modules() -> tuple[list[list[int]], list[list[int]], list[str], list[str]]:
    """(found, expected, warnings) of a module without a cache, and texts of refusals."""
    texts = list[str]()
    prompts, sampling = generated.prompts(), Sampling(max_new_tokens=6, temperature=0)
    with exact(), warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        model = filled(Plain())
        expected = []
        for prompt in prompts:
            row = prompt.ids.tolist()
            for _ in range(6):
                row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
            expected.append(row[len(prompt.ids) :])
        run = mk.parallelize(model, mk.init_mesh(""))
        for _ in range(2):
            found = generate(run, prompts, sampling=sampling)
        for kind in (Leaky, Fixed):
            with pytest.raises(mk.MeshkitError) as error:
                generate(mk.parallelize(filled(kind()), mk.init_mesh("")), prompts, sampling=sampling)
            texts.append(str(error.value))
    return [each.ids.tolist() for each in found], expected, [str(each.message) for each in said], texts


def filled(model: nn.Module) -> nn.Module:
    return causal.fill(model.double())


def test_a_module_of_ones_own_generates_by_whole_rows() -> None:
    ((found, expected, warned, texts),) = pool(1).run(of_plain_modules)
    assert found == expected
    (warning,) = warned  # once, of two calls
    assert warning.startswith(
        "generate: Plain computes whole rows for each token, since its forward takes no `mask`, and no"
    )
    assert texts[0].startswith("generate: Leaky is not causal: what follows a token changes its log-probabilities")
    assert texts[1].startswith(
        "generate: Fixed raises RuntimeError for rows of 19 tokens, as generation gives them: shape"
    )


# ----------------------------------------------------------------------------------------------------------- batches


def test_batches_keep_to_the_policy() -> None:
    def of(mixed: bool, **choices: int) -> list[list[tuple[int, int]]]:
        """For each batch, (prompt, samples)."""
        answers = [
            Answer(3 * index + sample, each, sample, 0) for index, each in enumerate(PROMPTS) for sample in range(3)
        ]
        made = batches(answers, 12, CachePolicy(**choices), mixed=mixed)
        return [[(PROMPTS.index(part.answers[0].prompt), len(part.answers)) for part in batch] for batch in made]

    assert of(True) == [[(1, 3), (0, 3), (4, 3), (3, 3), (2, 3)]]
    assert of(False) == [[(1, 3)], [(0, 3), (4, 3)], [(3, 3)], [(2, 3)]]
    assert of(True, max_sequences=6) == [[(1, 3), (0, 3)], [(4, 3), (3, 3)], [(2, 3)]]
    assert of(True, max_sequences=2)[:3] == [[(1, 2)], [(1, 1)], [(0, 2)]]
    assert of(True, prefill_tokens=10) == [[(1, 3), (0, 3)], [(4, 3)], [(3, 3)], [(2, 3)]]
    assert of(True, max_tokens=60)[0] == [(1, 3)]
    with pytest.raises(mk.errors.PlanError, match=r"a prompt of 16 ids and 12 new tokens need a cache of 27 tokens"):
        of(True, max_tokens=26)
