"""Blocks of the KV cache: sequences that begin, grow and end in any order are read where they are, each with its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshkit.algos.rollout import CachePolicy, Prompt, Sampling, _paged, _paged_writer, generate
from meshkit.algos.rollout._answers import Answer
from meshkit.algos.rollout._cache import KeyValueCache, Pages, Places
from meshkit.algos.rollout._paged import SideBySide
from meshkit.algos.rollout._scheduler import Scheduler, Step
from tests.laws.parity.cases import Cell, start
from tests.world import pool

PAGE, HEADS = 4, 3


@pytest.mark.parametrize("seed", range(4))
def test_runs_of_pages_are_free_ones_and_the_lowest(seed: int) -> None:
    draw, pages, used = np.random.default_rng(seed), Pages(), np.zeros(400, bool)
    runs: list[tuple[int, int]] = []
    for _ in range(200):
        if runs and draw.random() < 0.5:
            first, count = runs.pop(draw.integers(len(runs)))
            used[first : first + count] = False
            if draw.random() < 0.5:
                pages.give_back_run(first, count)
            else:
                for page in draw.permutation(np.arange(first, first + count)).tolist():
                    pages.give_back(page)
        else:
            count, at = int(draw.integers(1, 6)), int(draw.integers(-1, 20))
            lowest = next(first for first in range(400) if not used[first : first + count].any())
            wanted = at if at >= 0 and not used[at : at + count].any() else lowest
            assert pages.take_run(count, at=at) == wanted
            used[wanted : wanted + count] = True
            runs.append((wanted, count))
        assert pages.used == used.sum() and not used[pages.allocated :].any()


NOTHING = torch.empty(0, dtype=torch.int64), torch.empty(0, HEADS, 1), torch.empty(0, HEADS, 1)


def tokens_of(numbers: list[float]) -> Tensor:
    """[T, K]"""
    return torch.tensor(numbers)[:, None] + torch.arange(HEADS) / 8


def written(cache: KeyValueCache, step: Step, told: dict[int, list[float]]) -> None:
    """What a forward of the step does to one layer: each token has a number of its own, which `told` has by answer."""
    cache.copy(*step.copies_before)
    spans, numbers = [], list[float]()
    for begin in step.begins:
        first = [sum(map(len, told.values())) + place + 1.0 for place in range(len(begin.group.tokens))]
        for member in begin.members:
            told[member.answer.number] = list(first)
        spans += begin.spans
        numbers += first
    for sequence in step.grows:
        spans += sequence.spans(sequence.cached - 1, sequence.cached, PAGE)
        numbers.append(1e4 * sequence.answer.number + sequence.cached)
        told[sequence.answer.number].append(numbers[-1])
    tokens = tokens_of(numbers).unsqueeze(2)
    cache.write(0, Places.of(spans, torch.device("cpu")).rows(HEADS), tokens, -tokens)
    cache.copy(*step.copies)


@pytest.mark.parametrize("seed", range(6))
def test_rows_hold_their_tokens_whatever_comes_and_ends(seed: int) -> None:
    draw = np.random.default_rng(seed)
    cache = KeyValueCache(PAGE)
    policy = CachePolicy(page_tokens=PAGE, max_sequences=12, prefill_tokens=40)
    scheduler = Scheduler(Sampling(max_new_tokens=90), policy, cache.pages)
    prompts = [Prompt(ids=np.arange(length), key=key) for key, length in enumerate(draw.integers(1, 100, 12))]
    samples = draw.integers(1, 5, len(prompts))
    scheduler.add(
        [
            Answer(10 * prompt.key + n, prompt, n, 0)
            for prompt, of in zip(prompts, samples, strict=True)
            for n in range(of)
        ]
    )
    told: dict[int, list[float]] = {}
    while not scheduler.done:
        step = scheduler.next_step()
        written(cache, step, told)
        blocks = {id(row.block): row.block for row in scheduler.growing if row.block is not None}.values()
        for row in scheduler.growing:
            # Of more than 16 pages samples share them, and lie in pages anywhere.
            assert (row.block is None) == (len(row.group.answers) > 1 and len(row.answer.prompt.ids) >= 17 * PAGE)
            rows = Places.of(row.spans(0, row.cached, PAGE), torch.device("cpu")).rows(HEADS)
            assert torch.equal(cache.write(0, *NOTHING)[0][rows], tokens_of(told[row.answer.number]).flatten()[:, None])
        for block in blocks:
            places = SideBySide(len(block.rows), block.first * PAGE, block.stride * PAGE)
            keys, values = cache.write(0, *NOTHING)
            read = places.read(keys, HEADS, slice(0, block.longest))
            assert read.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
            assert torch.equal(places.read(values, HEADS, slice(0, block.longest))[0, :, 0], -read[0, :, 0])
            for row, of_row in zip(block.rows, read, strict=True):
                assert torch.equal(of_row[:, : row.cached, 0], tokens_of(told[row.answer.number]).T)
            # Lengths are compared when a row comes; a token later one may have opened a page.
            assert 2 * (-(-block.longest // PAGE) - 1) <= 3 * -(-block.shortest // PAGE) + 16
        scheduler.end(
            [row for row in scheduler.growing if row.cached > len(row.answer.prompt.ids) + 45 or draw.random() < 0.03]
        )
    assert cache.pages.used == 0


def steady() -> tuple[int, bool, bool]:
    """(rows of tokens that were made anew, whether attention read each growing sequence in the cache, without a bias)."""
    run, made, in_cache, biases = start(Cell(mesh="", layers=2, vocab=61)), [], [], []
    row_of, attend = _paged_writer.row_of, F.scaled_dot_product_attention

    def counted(step: Any, cache: KeyValueCache, **options: Any) -> Any:
        made.append(cache)
        return row_of(step, cache, **options)

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        stored = {
            each.untyped_storage().data_ptr() for layer in made[-1]._layers for each in (layer.keys, layer.values)
        }
        in_cache.append({k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr()} <= stored)
        biases.append(options["attn_mask"] is not None)
        return attend(q, k, v, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_paged_writer, "row_of", counted)
        patch.setattr(_paged.F, "scaled_dot_product_attention", watched)
        prompts = [Prompt(ids=np.array([key, 3, 5]), key=key) for key in range(2)]
        generate(run, prompts, sampling=Sampling(max_new_tokens=200), samples=3)
    decoded = in_cache[-199 * 2 :]
    return len(made), all(decoded), any(biases[-199 * 2 :])


def test_steps_of_the_same_sequences_go_on_and_read_keys_where_they_are() -> None:
    ((made, in_cache, biased),) = pool(1).run(steady)
    assert made <= 15 and in_cache and not biased
