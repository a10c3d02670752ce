"""`KeptCache`: a conversation over several calls computes each token once, and its log-probabilities are training's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import meshkit as mk
from meshkit.algos.rollout import CachePolicy, KeptCache, Prompt, Rollout, Sampling, generate
from tests.algos.rollout.test_generate import EXPERTS, ODD, PLAIN, TOL_FP64, VOCABULARY, log_probs_of_training
from tests.laws.parity.cases import Cell, mesh_for, start
from tests.models.families import transformers_model
from tests.tiny import tiny_config
from tests.world import RankError, pool, run_ranks

TOL_FP32 = 1e-6  # issue 23: the log-probability gap of a five-turn rollout
TURNS = 5
SAMPLING = Sampling(max_new_tokens=4, temperature=0.7, stop_ids=(4, 11))
SYSTEM = np.arange(9) * 5 % VOCABULARY  # what all prompts begin with: a page and a part of one
QUESTIONS = [Prompt(ids=np.concatenate([SYSTEM, [20 + n] * n]).astype(np.int64), key=50 + n) for n in (1, 2, 6)]

Talk = tuple[list[int], list[float], list[bool]]  # tokens after the prompt, their log-probabilities, who wrote them


def said(key: int, turn: int) -> list[int]:
    """What an environment answers: other tokens, and another number of them, in every conversation and turn."""
    return [(key * 7 + turn * 3 + index) % VOCABULARY for index in range(1 + (key + turn) % 3)]


def talk(run: mk.Run, questions: list[Prompt], cache: KeptCache | CachePolicy, samples: int = 2) -> list[Rollout]:
    """Conversations of TURNS turns, begun by `samples` answers to each question."""
    first = generate(run, questions, sampling=SAMPLING, samples=samples, seed=5, cache=cache)
    talks = [
        replace(each, key=each.key * 10 + index % samples, wrote=np.ones(len(each.ids), bool))
        for index, each in enumerate(first)
    ]
    for turn in range(1, TURNS):
        asked = [np.array(said(each.key, turn), np.int64) for each in talks]
        prompts = [Prompt(ids=np.concatenate([t.tokens, a]), key=t.key) for t, a in zip(talks, asked, strict=True)]
        more = generate(run, prompts, sampling=SAMPLING, seed=5 + turn, cache=cache)
        talks = [
            replace(
                t,
                ids=np.concatenate([t.ids, a, m.ids]),
                log_probs=np.concatenate([t.log_probs, np.zeros(len(a)), m.log_probs]),
                wrote=np.concatenate([t.wrote, np.zeros(len(a), bool), np.ones(len(m.ids), bool)]),
            )
            for t, a, m in zip(talks, asked, more, strict=True)
        ]
    return talks


def gap(run: mk.Run, talks: list[Rollout]) -> float:
    trained = log_probs_of_training(run, talks, SAMPLING.temperature)
    return max(
        (float(np.abs(each.log_probs - found)[each.wrote].max()) for each, found in zip(talks, trained, strict=True)),
        default=0.0,
    )


def conversed(cell: Cell, policy: CachePolicy) -> tuple[dict[int, list[int]], float, tuple[int, ...]]:
    """(the tokens of each conversation, the gap to training, what the cache counted and what there was)."""
    run = start(cell)
    busy = max(1, run.mesh.data_ranks - (run.mesh.data_ranks > 2))  # the last of many has no conversation
    own = QUESTIONS[run.mesh.data_rank :: busy] if run.mesh.data_rank < busy else []
    kept = KeptCache(policy)
    talks = talk(run, own, kept)
    # The last token of a conversation is never computed, and what samples of a question share is computed once.
    # Questions that begin in one step share whole pages.
    begin = len(SYSTEM) // policy.page_tokens * policy.page_tokens
    shared = sum(len(question.ids) for question in own) + max(0, len(own) - 1) * begin
    there = sum(len(each.tokens) - 1 for each in talks) - shared
    return {each.key: each.ids.tolist() for each in talks}, gap(run, talks), (kept.prefilled + kept.decoded, there)


LAYOUTS = [
    (1, PLAIN, CachePolicy(page_tokens=4)),
    (1, PLAIN, CachePolicy(page_tokens=1)),
    (1, ODD, CachePolicy(page_tokens=3)),
    (1, EXPERTS, CachePolicy()),
    (2, replace(PLAIN, mesh="dp_shard=2"), CachePolicy(keep_parameters=False)),
    (2, replace(PLAIN, mesh="dp_replicate=2"), CachePolicy(page_tokens=4)),
    (2, replace(PLAIN, mesh="tp=2", sequence=True), CachePolicy(page_tokens=4)),
    (2, replace(PLAIN, mesh="cp=2"), CachePolicy(page_tokens=4)),
    (2, replace(PLAIN, mesh="pp=2"), CachePolicy(page_tokens=4)),
    (4, replace(EXPERTS, mesh="dp_shard=4 ep=2"), CachePolicy(page_tokens=4)),
    (4, replace(PLAIN, mesh="dp_replicate=2 tp=2"), CachePolicy(page_tokens=4)),
]


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[int, list[int]]]:
    """Without a cache that stays, on one device."""
    (plain,) = pool(1).run(without, PLAIN)
    (odd,) = pool(1).run(without, ODD)
    (experts,) = pool(1).run(without, EXPERTS)
    return {"plain": plain, "odd": odd, "experts": experts}


def without(cell: Cell) -> dict[int, list[int]]:
    return {each.key: each.ids.tolist() for each in talk(start(cell), QUESTIONS, CachePolicy())}


@pytest.mark.parametrize(
    ("world", "cell", "policy"), LAYOUTS, ids=[f"{c.mesh}-{i}" for i, (_, c, _) in enumerate(LAYOUTS)]
)
def test_each_token_is_computed_once_and_its_log_probability_is_trainings(
    world: int, cell: Cell, policy: CachePolicy, expected: dict[str, dict[int, list[int]]]
) -> None:
    wanted = expected["experts" if cell.moe else "odd" if cell.qwen else "plain"]
    seen: dict[int, list[int]] = {}
    for tokens, off, (computed, there) in pool(world).run(conversed, cell, policy):
        assert off <= TOL_FP64
        assert computed == there
        seen |= tokens
    assert seen == wanted


def in_fp32() -> float:
    config = tiny_config(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, head_dim=8)
    run = mk.parallelize(mk.models.Llama(config), mesh_for(""), plan=mk.models.LLAMA_PLAN)
    mk.init_weights(run.model, seed=0)
    return gap(run, talk(run, QUESTIONS, KeptCache()))


def test_the_gap_in_fp32_after_five_turns() -> None:
    (off,) = pool(1).run(in_fp32)
    assert off <= TOL_FP32, off


def room() -> list[bool]:
    """With room for what grows and little else: what was used longest ago goes, and nothing else changes."""
    run = start(PLAIN)
    kept = KeptCache(CachePolicy(page_tokens=4, max_tokens=96, max_sequences=2))
    talks = talk(run, QUESTIONS, kept)
    pages = kept.store.pages
    small = pages.allocated <= 24
    kept.forget()
    return [small, gap(run, talks) <= TOL_FP64, kept.store.pages.used == 0]


def test_a_full_cache_gives_back_what_was_used_longest_ago() -> None:
    assert pool(1).run(room) == [[True, True, True]]


def updated() -> list[int]:
    """Tokens of a prompt that were computed: at first, again, and after the weights changed."""
    run = start(PLAIN)
    optimizer = mk.adamw(run, lr=1e-2)
    kept, seen = KeptCache(), [0]
    for _ in range(2):
        for _ in range(2):
            (answer,) = generate(run, QUESTIONS[:1], sampling=SAMPLING, cache=kept)
            seen.append(kept.prefilled)
        assert gap(run, [replace(answer, wrote=np.ones(len(answer.ids), bool))]) <= TOL_FP64
        ids = torch.from_numpy(answer.tokens)[None]
        run.forward_backward({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
        optimizer.step()
    return np.diff(seen).tolist()


def test_what_other_weights_computed_is_forgotten() -> None:
    length = len(QUESTIONS[0].ids)
    assert pool(1).run(updated) == [[length, 1, length, 1]]


def refused() -> None:
    model = transformers_model("llama2")
    run = mk.parallelize(model, mesh_for(""))
    generate(run, QUESTIONS, sampling=SAMPLING, cache=KeptCache())


def test_a_model_with_a_cache_of_its_own_is_refused() -> None:
    with pytest.raises(
        RankError, match="LlamaForCausalLM does not attend by a `mask`, and its own cache does not stay"
    ):
        run_ranks(1, refused)
