"""`generate`: its log-probabilities are training's, its tokens one device's, whatever the mesh and the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import meshkit as mk
from meshkit.algos.rollout import CachePolicy, Prompt, Rollout, Sampling, generate, token_values
from meshkit.algos.rollout._answers import Answer
from meshkit.algos.rollout._cache import Pages, Span
from meshkit.algos.rollout._sampler import Noise, choose
from meshkit.algos.rollout._scheduler import Scheduler
from meshkit.core.sharding import chunk
from meshkit.loss import token_log_probs
from meshkit.loss.linear_logits import sharded_logits
from meshkit.models import build_model, config_from_pretrained, load_pretrained
from meshkit.models.deepseek import DeepseekV3
from meshkit.step import model_inputs
from tests.laws.parity.cases import Cell, Moe, build, start
from tests.models.families import transformers_model
from tests.tiny import draw_parameters, tiny_deepseek
from tests.world import pool

TOL_FP64 = 1e-10  # attention over a cache and over whole rows sums in other orders
VOCABULARY = 61  # which no tp here divides
PROMPTS = [Prompt(ids=np.arange(3, 3 + length) * 7 % VOCABULARY, key=100 + length) for length in (5, 1, 16, 9, 23)]
SAMPLING = Sampling(max_new_tokens=12, temperature=0.7, stop_ids=(4, 11))

Answers = list[tuple[int, list[int], list[float], bool]]  # key, ids, log-probabilities, truncated


def answers(found: list[Rollout]) -> Answers:
    return [(c.key, c.ids.tolist(), c.log_probs.tolist(), c.truncated) for c in found]


def log_probs_of_training(run: mk.Run, found: list[Rollout], temperature: float) -> list[np.ndarray]:
    """Of each answer's tokens, by the path that losses take; a row of padding where a rank has no answer."""
    rows = [c.tokens for c in found]
    width = 48
    ids = torch.zeros(max(1, len(rows)), width + 1, dtype=torch.int64)
    labels = torch.full((max(1, len(rows)), width), -100)
    for index, (row, completion) in enumerate(zip(rows, found, strict=True)):
        ids[index, : len(row)] = torch.from_numpy(row)
        begin = len(completion.prompt_ids) - 1
        labels[index, begin : len(row) - 1] = torch.from_numpy(completion.ids)

    def values(model: nn.Module, part: dict[str, Any]) -> Tensor:
        return token_log_probs(model(**model_inputs(model, part)), part["labels"], temperature=temperature).log_probs

    table = token_values(run, {"input_ids": ids[:, :-1], "labels": labels}, values)
    return [
        table[index, len(c.prompt_ids) - 1 : len(c.prompt_ids) - 1 + len(c.ids)].numpy()
        for index, c in enumerate(found)
    ]


def generated(cell: Cell, sampling: Sampling, samples: int, cache: CachePolicy) -> tuple[Answers, float]:
    """This data rank's answers, and how far their log-probabilities are from training's. The last of many has no prompts."""
    run = start(cell)
    busy = max(1, run.mesh.data_ranks - (run.mesh.data_ranks > 2))
    own = PROMPTS[run.mesh.data_rank :: busy] if run.mesh.data_rank < busy else []
    found = generate(run, own, sampling=sampling, samples=samples, seed=5, cache=cache)
    assert run.model.training
    trained = log_probs_of_training(run, found, sampling.temperature or 1.0)
    errors = [np.abs(c.log_probs - values).max() for c, values in zip(found, trained, strict=True)]
    return answers(found), float(max(errors, default=0.0))


def on_one_device(cell: Cell) -> Cell:
    return replace(cell, mesh="", sequence=False, recompute="none", memory=None, schedule="1f1b")


@pytest.fixture(scope="module")
def expected() -> dict[Cell, Answers]:
    """All that one device answers, before worlds of more ranks start."""
    found = {}
    for cell in {on_one_device(cell) for _, cell, _ in LAYOUTS}:
        ((found[cell], error),) = pool(1).run(generated, cell, SAMPLING, 3, CachePolicy())
        assert error <= TOL_FP64
    return found


def assert_same(found: Answers, expected: Answers) -> None:
    for own, one in zip(found, expected, strict=True):
        assert own[:2] == one[:2] and own[3] == one[3]
        assert np.abs(np.array(own[2]) - np.array(one[2])).max() <= TOL_FP64


PLAIN = Cell(mesh="", layers=2, vocab=VOCABULARY)
EXPERTS = replace(PLAIN, moe=Moe(experts=8))
ODD = replace(PLAIN, window=5, qwen=True)
LAYOUTS = [
    (2, replace(PLAIN, mesh="dp_shard=2"), CachePolicy()),
    (2, replace(PLAIN, mesh="dp_shard=2"), CachePolicy(keep_parameters=False, max_sequences=4)),
    (2, replace(PLAIN, mesh="dp_replicate=2"), CachePolicy()),
    (2, replace(PLAIN, mesh="tp=2"), CachePolicy(prefill_tokens=1)),
    (2, replace(PLAIN, mesh="tp=2", sequence=True), CachePolicy(page_tokens=4)),
    (2, replace(PLAIN, mesh="cp=2"), CachePolicy(page_tokens=1)),  # past tokens in several blocks
    (2, replace(PLAIN, mesh="pp=2"), CachePolicy()),
    (2, replace(ODD, mesh="tp=2", recompute="full"), CachePolicy(page_tokens=3)),
    (2, replace(PLAIN, mesh="tp=2", memory=mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss())), CachePolicy()),
    (2, replace(EXPERTS, mesh="dp_shard=2 ep=2"), CachePolicy()),
    (4, replace(PLAIN, mesh="tp=4"), CachePolicy()),  # more ranks than key/value heads
    (4, replace(EXPERTS, mesh="dp_shard=4 ep=2"), CachePolicy(keep_parameters=False)),
    (4, replace(PLAIN, layers=4, mesh="pp=2 dp_shard=2", schedule="zbv"), CachePolicy(max_tokens=128)),
    (4, replace(EXPERTS, mesh="cp=2 tp=2 ep=4"), CachePolicy()),
]


@pytest.mark.parametrize(
    ("world", "cell", "cache"), LAYOUTS, ids=[f"{c.mesh.replace(' ', ',')}-{i}" for i, (_, c, _) in enumerate(LAYOUTS)]
)
def test_answers_are_those_of_one_device_and_their_log_probabilities_those_of_training(
    world: int, cell: Cell, cache: CachePolicy, expected: dict[Cell, Answers]
) -> None:
    one_device = expected[on_one_device(cell)]
    assert {truncated for *_, truncated in one_device} == {False, True}
    by_rank = pool(world).run(generated, cell, SAMPLING, 3, cache)
    seen = set()
    for found, error in by_rank:
        assert error <= TOL_FP64
        assert_same(found, [one for one in one_device if one[0] in {own[0] for own in found}])
        seen |= {own[0] for own in found}
    assert seen == {prompt.key for prompt in PROMPTS}
    if "dp_shard=4" in cell.mesh:
        assert by_rank[3][0] == []


# ------------------------------------------------------------------------------------- oracles other than our own layers


def greedy_without_a_cache(model: nn.Module, prompt: np.ndarray, new_tokens: int) -> list[int]:
    ids = prompt.tolist()
    with torch.no_grad():
        for _ in range(new_tokens):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def latent() -> nn.Module:
    """Latent attention: values are smaller than keys."""
    torch.manual_seed(0)
    config = tiny_deepseek(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        qk_nope_head_dim=8,
        v_head_dim=6,
    )
    model = DeepseekV3(config).double()
    draw_parameters(model, std=0.3)
    return model


def greedy_answers() -> list[tuple[list[int], list[int]]]:
    """(ours, without a cache) of an odd decoder, a compiled one, and latent attention."""
    mesh, pairs = mk.init_mesh(""), []
    sampling = Sampling(max_new_tokens=10, temperature=0)
    for model, compiled in ((build(ODD), "eager"), (latent(), False)):
        plain = copy.deepcopy(model)
        run = mk.parallelize(model, mesh, compile=compiled)
        found = generate(run, PROMPTS, sampling=sampling, cache=CachePolicy(page_tokens=4, max_sequences=3))
        pairs += [(c.ids.tolist(), greedy_without_a_cache(plain, c.prompt_ids, 10)) for c in found]
    return pairs


def test_greedy_answers_are_those_of_a_model_without_a_cache() -> None:
    pairs = pool(1).run(greedy_answers)[0]
    assert len({tuple(expected) for _, expected in pairs}) == len(pairs)
    for found, expected in pairs:
        assert found == expected


def beside_transformers(folder: str) -> list[tuple[list[int], list[int]]]:
    theirs = transformers_model("llama3").eval()
    theirs.save_pretrained(folder)
    run = mk.parallelize(load_pretrained(build_model(config_from_pretrained(folder)), folder), mk.init_mesh(""))
    prompts = [Prompt(ids=np.arange(1, length) * 5 % 97, key=length) for length in (4, 12, 30)]
    ends = (3, 50)
    found = generate(run, prompts, sampling=Sampling(max_new_tokens=20, temperature=0, stop_ids=ends))
    pairs = []
    for completion in found:
        ids = torch.from_numpy(completion.prompt_ids).unsqueeze(0)
        out = theirs.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=list(ends), pad_token_id=0)
        pairs.append((completion.ids.tolist(), out[0, ids.shape[1] :].tolist()))
    return pairs


def test_greedy_answers_are_those_of_transformers_generate(tmp_path: Path) -> None:
    for found, expected in pool(1).run(beside_transformers, str(tmp_path))[0]:
        assert found == expected


def noise(draws: int) -> Noise:
    return Noise(torch.arange(draws) * 977, torch.zeros(draws, dtype=torch.int64))


def drawn(sampling: Sampling, draws: int) -> Tensor:
    """How often each token is drawn from one row of logits."""
    logits = torch.linspace(-3, 2, 12, dtype=torch.float64).roll(5).unsqueeze(0)
    ids, log_probs = choose(logits, torch.zeros(draws, dtype=torch.int64), noise(draws), sampling)
    expected = (logits / sampling.temperature).log_softmax(-1)[0, ids]
    assert (log_probs - expected).abs().max() <= TOL_FP64
    return ids.bincount(minlength=12) / draws


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8, "min_p": 0.1}],
)
def test_tokens_are_drawn_as_often_as_transformers_filters_say(options: dict[str, Any]) -> None:
    sampling = Sampling(**{"max_new_tokens": 1, **options})
    scores = torch.linspace(-3, 2, 12, dtype=torch.float64).roll(5).unsqueeze(0) / sampling.temperature
    for wanted, warper in (
        (sampling.top_k, transformers.TopKLogitsWarper),
        (sampling.top_p if sampling.top_p < 1 else None, transformers.TopPLogitsWarper),
        (sampling.min_p or None, transformers.MinPLogitsWarper),
    ):
        scores = scores if wanted is None else warper(wanted)(torch.empty(1, 0), scores)
    expected, draws = scores.softmax(-1)[0], 20_000
    found = drawn(sampling, draws)
    assert torch.equal(found > 0, expected > 0)
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all()


def test_top_p_that_is_met_exactly_takes_no_further_token() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    kept = transformers.TopPLogitsWarper(0.5)(torch.empty(1, 0), logits).isfinite()
    assert kept.tolist() == [[True, False, False]]
    sampling = Sampling(max_new_tokens=1, top_p=0.5)
    ids, _ = choose(logits, torch.zeros(200, dtype=torch.int64), noise(200), sampling)
    assert not ids.any()


def filtered_over_ranks(options: dict[str, Any]) -> tuple[list[int], list[int]]:
    """(of logits sharded over tp, whole) draws; a rank of three has none of four tokens."""
    axis = mk.init_mesh("tp=3")["tp"]
    torch.manual_seed(2)
    logits = torch.randn(5, 4, dtype=torch.float64)
    part = chunk(4, 3, axis.get_local_rank())
    rows = torch.arange(5).repeat(40)
    sampling = Sampling(max_new_tokens=1, **options)
    found = choose(sharded_logits(logits[:, part].contiguous(), axis, 4), rows, noise(200), sampling)
    expected = choose(logits, rows, noise(200), sampling)
    assert (found[1] - expected[1]).abs().max() <= TOL_FP64
    return found[0].tolist(), expected[0].tolist()


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.4, "top_k": 3}])
def test_a_sharded_vocabulary_draws_the_same_tokens(options: dict[str, Any]) -> None:
    for found, expected in pool(3).run(filtered_over_ranks, options):
        assert found == expected


# ------------------------------------------------------------------------------------------ ends, memory, refusals


def ended_by_text() -> list[tuple[str, bool]]:
    run = start(PLAIN)

    def decode(ids: list[int]) -> str:
        return "".join(chr(ord("A") + id) for id in ids)

    sampling = Sampling(max_new_tokens=40, stop_strings=("F", "ab"))
    found = generate(run, PROMPTS, sampling=sampling, samples=4, decode=decode)
    assert [c.text for c in found] == [decode(c.ids.tolist()) for c in found]
    return [(c.text, c.truncated) for c in found]


def test_an_answer_ends_with_the_token_that_completes_a_stop_string() -> None:
    found = pool(1).run(ended_by_text)[0]
    assert {truncated for _, truncated in found} == {False, True}
    for text, truncated in found:
        stopped = text.endswith(("F", "ab"))
        assert stopped != truncated and (stopped or len(text) == 40)
        assert "F" not in text[:-1] and "ab" not in text[:-1]


def test_pages_are_shared_copied_and_given_back() -> None:
    prompts = [Prompt(ids=np.arange(10), key=0), Prompt(ids=np.arange(8), key=1)]
    policy, pages = CachePolicy(page_tokens=4, max_tokens=40), Pages()
    scheduler = Scheduler(Sampling(max_new_tokens=4), policy, pages)
    scheduler.add([Answer(3 * prompt.key + sample, prompt, sample, 0) for prompt in prompts for sample in range(3)])
    step = scheduler.next_step()
    # 2 + 3 * 2 pages of 10; the other needs 2 + 3 * 1
    assert [begin.group.answers[0].prompt.key for begin in step.begins] == [0]
    first, second, third = step.draws
    assert list(first.table[:2]) == list(second.table[:2]) == list(third.table[:2])
    assert step.copies == tuple(
        [Span(4 * each.table[2], 4) for each in row] for row in ((first, first), (second, third))
    )
    assert pages.used == 5
    for _ in range(3):
        step = scheduler.next_step()
    assert pages.used == 8 and step.begins == []
    scheduler.end([first, third])
    step = scheduler.next_step()
    # What two have given back is enough.
    assert [begin.group.answers[0].prompt.key for begin in step.begins] == [1]
    scheduler.end(list(scheduler.growing))
    assert scheduler.done and pages.used == 0 and pages.allocated == 8


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Prompt(ids=np.array([], np.int64), key=3), r"Prompt\(key=3\): no ids"),
        (lambda: Prompt(ids=np.zeros((2, 2)), key=3), r"ids are float64 \[2, 2\]"),
        (lambda: Sampling(max_new_tokens=0), r"Sampling\(max_new_tokens=0\): it must be a whole number of at least 1"),
        (lambda: Sampling(max_new_tokens=1, top_p=0.0), r"Sampling\(top_p=0.0\): it must be above 0"),
        (lambda: Sampling(max_new_tokens=1, stop_strings=("",)), r"stop_strings=\('',\)\): it must be strings of at"),
        (
            lambda: Sampling(max_new_tokens=1, temperature=1e-40),
            r"temperature=1e-40\): it must be 0, which is greedy, or a",
        ),
        (lambda: Sampling(max_new_tokens=1, temperature=float("nan")), r"temperature=nan\): it must be 0"),
        (lambda: Sampling(max_new_tokens=1, stop_ids=5), r"stop_ids=5\): it must be a tuple of ids"),
        (lambda: CachePolicy(page_tokens=0), r"CachePolicy\(page_tokens=0\): it must be a whole number of at least 1"),
        (lambda: CachePolicy(page_tokens=2.5), r"CachePolicy\(page_tokens=2.5\): it must be a whole number"),
        (lambda: CachePolicy(max_sequences=None), r"CachePolicy\(max_sequences=None\): it must be a whole number"),
        (
            lambda: Scheduler(SAMPLING, CachePolicy(max_tokens=8), Pages()).add([Answer(0, PROMPTS[0], 0, 0)]),
            r"a prompt of 5 ids and 12 new tokens need a cache of 16 tokens, but CachePolicy\(max_tokens=8\)",
        ),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(mk.MeshkitError, match=match):
        make()


def refused() -> list[str]:
    run, texts = start(PLAIN), []
    for call in (
        partial(generate, run, [Prompt(ids=np.array([7, 61]), key=1)], sampling=SAMPLING),
        partial(generate, run, PROMPTS, sampling=replace(SAMPLING, stop_strings=("x",))),
        partial(generate, run, PROMPTS, sampling=SAMPLING, samples=0),
        partial(generate, run, PROMPTS, sampling=SAMPLING, samples=2.0),
        partial(generate, run, PROMPTS, sampling=None),
    ):
        with pytest.raises(mk.MeshkitError) as error:
            call()
        texts.append(str(error.value))
    return texts


def test_what_cannot_be_answered_is_refused() -> None:
    (texts,) = pool(1).run(refused)
    for text, start_of_it in zip(
        texts,
        (
            "generate: Prompt(key=1) has the id 61, but the vocabulary ends at 60.",
            "generate: stop_strings=('x',) are found in text. Give decode=",
            "generate(samples=0): ask for a whole number of answers to each prompt, at least 1.",
            "generate(samples=2.0): ask for a whole number of answers",
            "generate(sampling=None): say how tokens are drawn, as Sampling(max_new_tokens=64).",
        ),
        strict=True,
    ):
        assert text.startswith(start_of_it)
