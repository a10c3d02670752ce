"""Bands become kernel calls: every visible pair is computed once, on whatever rank, with no call too many."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshkit.core.attention_tiles import ANTI, CAUSAL, FULL, Tile, tiles
from meshkit.mask import Mask
from meshkit.parallel.context import Layout
from meshkit.parallel.context._assign import contiguous, zigzag
from meshkit.parallel.context._layout import KV_EXCHANGES, KVExchange, gathered_tiles, layout_of, plan
from tests.test_mask import grids, masks

draws = settings(deadline=None)  # a busy machine


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any runs on any number of ranks: uneven, some empty, with padding; and the grid that Ulysses makes of them."""
    mask = draw(masks)
    ulysses, groups = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    ranks = ulysses * groups
    held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    cuts = sorted({0, mask.tokens, *draw(st.sets(st.integers(0, mask.tokens), max_size=12))})
    for first, after in pairwise(cuts):
        own = held[draw(st.integers(0, ranks - 1))]
        if own and own[-1][1] == first:
            own[-1] = (own[-1][0], after)
        else:
            own.append((first, after))
    lengths = [sum(after - first for first, after in own) + draw(st.integers(0, 2)) for own in held]
    exchange = draw(st.sampled_from(KV_EXCHANGES))
    runs = tuple(tuple(own) for own in held)
    return Layout(mask, runs, tuple(lengths), exchange, ulysses, draw(st.integers(1, 3)))


def paint(kernel_calls: list[Tile], canvas: Tensor) -> None:
    """Add 1 for every pair that the calls compute."""
    for q0, q1, k0, k1, kind in kernel_calls:
        assert 0 <= q0 < q1 <= canvas.shape[0]
        assert 0 <= k0 < k1 <= canvas.shape[1]
        if kind != FULL:
            assert q1 - q0 == k1 - k0, "the kernels' causal calls are square"
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.int64)
        canvas[q0:q1, k0:k1] += seen.tril() if kind == CAUSAL else seen.triu() if kind == ANTI else seen


def tokens_of(layout: Layout, group: int) -> Tensor:
    """The token at each place of the group's tensors; -1 for padding."""
    held: list[int] = []
    for rank in layout.members(group):
        own = [token for first, after in layout.runs[rank] for token in range(first, after)]
        held += [*own, *[-1] * (layout.lengths[rank] - len(own))]
    return torch.tensor(held, dtype=torch.int64)


def add_by_token(total: Tensor, canvas: Tensor, queries: Tensor, keys: Tensor) -> None:
    """Add pairs of places to pairs of tokens; padding must be blank."""
    real_q, real_k = queries >= 0, keys >= 0
    assert not canvas[~real_q].any(), "a query of padding is computed"
    assert not canvas[:, ~real_k].any(), "a key of padding is seen"
    total[queries[real_q].unsqueeze(1), keys[real_k].unsqueeze(0)] += canvas[real_q][:, real_k]


# ---------------------------------------------------------------------------------------------------------------- tiles


@draws
@given(masks)
def test_tiles_paint_the_mask_and_each_pair_once(mask: Mask) -> None:
    canvas = torch.zeros(mask.tokens, mask.tokens, dtype=torch.int64)
    paint(tiles(mask.bands), canvas)
    assert torch.equal(canvas, mask.dense().long())


@settings(deadline=None, max_examples=300)
@given(grids(max_tokens=9))
def test_tiles_of_small_odd_bands_paint_each_pair_once(mask: Mask) -> None:
    canvas = torch.zeros(mask.tokens, mask.tokens, dtype=torch.int64)
    paint(tiles(mask.bands), canvas)
    assert torch.equal(canvas, mask.dense().long())


@draws
@given(st.integers(1, 60))
def test_whole_masks_are_one_call(tokens: int) -> None:
    assert tiles(Mask.full(tokens).bands) == [Tile(0, tokens, 0, tokens, FULL)]
    (causal,) = tiles(Mask.causal(tokens).bands)
    assert causal[:4] == (0, tokens, 0, tokens)
    assert len(tiles(Mask.documents([tokens] * 4).bands)) == 4


@draws
@given(st.integers(2, 6), st.integers(1, 8))
def test_a_window_is_two_calls_for_as_many_tokens(times: int, window: int) -> None:
    assert len(tiles(Mask.causal(times * window, window=window).bands)) <= 2 * times


# -------------------------------------------------------------------------------------------------------------- layouts


@draws
@given(layouts())
def test_a_layout_survives_its_table(layout: Layout) -> None:
    table = layout.table()
    assert table.dtype == torch.int64
    assert table.device.type == "cpu"
    assert layout_of(table) == layout
    assert layout_of(table.clone()) == layout


@pytest.mark.parametrize("exchange", KV_EXCHANGES)
@draws
@given(layout=layouts())
def test_the_plans_of_all_groups_compute_each_visible_pair_once(exchange: KVExchange, layout: Layout) -> None:
    layout = replace(layout, exchange=exchange)
    total = torch.zeros(layout.mask.tokens, layout.mask.tokens, dtype=torch.int64)
    everybody = torch.arange(layout.mask.tokens)
    for group in range(layout.groups):
        queries = tokens_of(layout, group)
        if layout.exchange == "all_gather":
            canvas = torch.zeros(len(queries), layout.mask.tokens, dtype=torch.int64)
            paint(gathered_tiles(layout, group), canvas)
            add_by_token(total, canvas, queries, everybody)
            continue
        steps = plan(layout, group).steps
        assert [step.owner for step in steps] == [(group - t) % layout.groups for t in range(layout.groups)]
        for step in steps:
            theirs = tokens_of(layout, step.owner)
            keys = torch.cat([theirs[:0], *(theirs[first:after] for first, after in step.keys)])
            canvas = torch.zeros(len(queries), len(keys), dtype=torch.int64)
            paint(step.tiles, canvas)
            add_by_token(total, canvas, queries, keys)
    assert torch.equal(total, layout.mask.dense().long())


@draws
@given(layouts())
def test_group_cast_sends_just_the_keys_that_are_seen(layout: Layout) -> None:
    layout = replace(layout, exchange="group_cast")
    dense = layout.mask.dense()
    for group in range(layout.groups):
        queries = tokens_of(layout, group)
        seen = dense[queries[queries >= 0]].any(0)
        own = plan(layout, group)
        for t in range(1, layout.groups):
            step = own.steps[t]
            theirs = tokens_of(layout, step.owner).tolist()
            got = [theirs[place] for first, after in step.keys for place in range(first, after)]
            assert got == [token for token in theirs if token >= 0 and seen[token]]
            assert plan(layout, step.owner).sends[t] == step.keys, "the owner sends other keys"


@draws
@given(st.integers(1, 7), st.integers(2, 7), st.sampled_from(["ring", "group_cast"]))
def test_zigzag_of_a_causal_document_is_one_call_a_step(ranks: int, chunk: int, exchange: str) -> None:
    tokens = 2 * ranks * chunk
    layout = Layout(Mask.causal(tokens), tuple(zigzag(tokens, ranks)), (2 * chunk,) * ranks, exchange)  # type: ignore[arg-type]
    for group in range(ranks):
        assert [len(step.tiles) for step in plan(layout, group).steps] == [1] * ranks


@draws
@given(st.integers(1, 7), st.integers(1, 6), st.sampled_from(["ring", "group_cast"]))
def test_contiguous_tokens_of_a_causal_document_are_one_call_or_none(ranks: int, chunk: int, exchange: str) -> None:
    tokens = ranks * chunk
    layout = Layout(Mask.causal(tokens), tuple(contiguous(tokens, ranks)), (chunk,) * ranks, exchange)  # type: ignore[arg-type]
    for group in range(ranks):
        calls = [len(step.tiles) for step in plan(layout, group).steps]
        assert calls == [1] * (group + 1) + [0] * (ranks - 1 - group)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_zigzag_over_gathered_keys_is_two_calls_a_chunk(ranks: int) -> None:
    tokens = 2 * ranks * 4
    layout = Layout(Mask.causal(tokens), tuple(zigzag(tokens, ranks)), (8,) * ranks, "all_gather")
    assert max(len(gathered_tiles(layout, group)) for group in range(ranks)) <= 4
