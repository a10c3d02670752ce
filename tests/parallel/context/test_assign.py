from __future__ import annotations

from itertools import pairwise
from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.errors import PlanError
from meshkit.mask import Interval, Mask
from meshkit.parallel.context._assign import (
    Balance,
    Runs,
    assign,
    contiguous,
    cut,
    keys_needed,
    locality,
    per_document,
    received,
    work,
    zigzag,
)

draws = settings(deadline=None)  # a busy machine
BALANCES: tuple[Balance, ...] = ("contiguous", "zigzag", "per_document", "locality")

parts = st.integers(1, 7)
lengths = st.lists(st.integers(0, 14), max_size=5)
windows = st.none() | st.integers(1, 9)


@st.composite
def prefix_lms(draw: st.DrawFn) -> Mask:
    documents = draw(lengths)
    return Mask.prefix_lm(documents, [draw(st.integers(0, length)) for length in documents])


@st.composite
def intervals(draw: st.DrawFn) -> Mask:
    """Any mask: two halves of the keys, each with entries of its own; some tokens may see or show nothing."""
    tokens = draw(st.integers(0, 40))
    middle = draw(st.integers(0, tokens))
    entries = []
    for first, after in ((0, middle), (middle, tokens)):
        for queries in pairwise(sorted(draw(st.sets(st.integers(0, tokens), max_size=5)))):
            keys = sorted(draw(st.tuples(st.integers(first, after), st.integers(first, after))))
            if draw(st.booleans()):
                entries.append((queries, (keys[0], keys[1]), draw(st.sampled_from(["full", "causal"]))))
    return Mask.intervals(tokens, draw(st.permutations(entries)))


masks = st.one_of(
    st.builds(Mask.documents, lengths, window=windows, kind=st.sampled_from(["full", "causal"])),
    prefix_lms(),
    intervals(),
)


def packing(seed: int, tokens: int = 131_072) -> Mask:
    """Causal documents, half of them log-normal and half Pareto; the last one is cut to fit."""
    draw, documents = np.random.default_rng(seed), list[int]()
    while left := tokens - sum(documents):
        log_normal, pareto = draw.lognormal(7, 1.5), 200 * (1 + draw.pareto(0.8))
        documents.append(min(left, int(log_normal if draw.random() < 0.5 else pareto)))
    return Mask.documents(documents)


def tokens_of(runs: Runs) -> list[int]:
    return [token for first, after in runs for token in range(first, after)]


def runs_of(shown: np.ndarray) -> Runs:
    """The intervals of the true entries."""
    edges = np.flatnonzero(np.diff(np.pad(shown.astype(int), 1))).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


# ------------------------------------------------------------------------------------------------------ every balance


@draws
@given(masks, parts, st.sampled_from(BALANCES))
def test_every_token_is_held_once_in_ascending_runs(mask: Mask, parts: int, balance: Balance) -> None:
    assignment = assign(mask, parts, balance=balance)
    assert len(assignment) == parts
    assert sorted(token for runs in assignment for token in tokens_of(runs)) == list(range(mask.tokens))
    for runs in assignment:
        assert all(first < after for first, after in runs)
        assert all(after < first for (_, after), (first, _) in pairwise(runs))  # ascending, adjacent ones merged


@draws
@given(masks, parts, st.sampled_from(BALANCES))
def test_ranks_hold_equal_numbers_of_tokens(mask: Mask, parts: int, balance: Balance) -> None:
    held = [len(tokens_of(runs)) for runs in assign(mask, parts, balance=balance)]
    assert max(held) - min(held) <= (2 if balance == "zigzag" else 1)  # zigzag: of each of two chunks


@draws
@given(masks, parts, st.sampled_from(BALANCES), st.randoms(use_true_random=False))
def test_the_order_of_bands_changes_nothing(mask: Mask, parts: int, balance: Balance, random: object) -> None:
    shuffled = list(mask.bands)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    same = Mask(mask.tokens, tuple(shuffled))
    assignment = assign(mask, parts, balance=balance)
    assert assign(same, parts, balance=balance) == assignment
    assert [keys_needed(same, runs) for runs in assignment] == [keys_needed(mask, runs) for runs in assignment]


@draws
@given(masks, parts, st.sampled_from(BALANCES))
def test_work_and_keys_are_those_of_the_dense_mask(mask: Mask, parts: int, balance: Balance) -> None:
    dense = mask.dense().numpy()
    assignment = assign(mask, parts, balance=balance)
    seen = [dense[tokens_of(runs)].any(0) for runs in assignment]
    assert work(mask, assignment) == [int(dense[tokens_of(runs)].sum()) for runs in assignment]
    assert [keys_needed(mask, runs) for runs in assignment] == [runs_of(keys) for keys in seen]
    expected = [int(np.delete(keys, tokens_of(runs)).sum()) for keys, runs in zip(seen, assignment, strict=True)]
    assert received(mask, assignment) == expected


# ---------------------------------------------------------------------------------------------------------- each alone


def test_contiguous_is_a_stretch_a_rank() -> None:
    assert contiguous(10, 4) == [((0, 2),), ((2, 5),), ((5, 7),), ((7, 10),)]
    assert contiguous(2, 3) == [(), ((0, 1),), ((1, 2),)]


def test_zigzag_pairs_an_early_chunk_with_a_late_one() -> None:
    assert zigzag(16, 2) == [((0, 4), (12, 16)), ((4, 12),)]
    assert zigzag(1, 3) == [((0, 1),), (), ()]


@draws
@given(parts, st.integers(1, 20))
def test_zigzag_and_locality_share_one_causal_document_evenly(parts: int, chunk: int) -> None:
    tokens = 2 * parts * chunk
    mask = Mask.causal(tokens)
    assert work(mask, zigzag(tokens, parts)) == [tokens * (tokens + 1) // 2 // parts] * parts
    assert locality(mask, parts) == zigzag(tokens, parts)
    assert per_document(mask, parts) == zigzag(tokens, parts)


@draws
@given(st.lists(st.integers(0, 60), max_size=12), parts)
def test_per_document_differs_by_less_than_the_tokens(documents: list[int], parts: int) -> None:
    # Of a document of L tokens uneven edges shift the two chunks of a rank by L pairs, and its two dealt tokens see L.
    mask = Mask.documents(documents)
    found = work(mask, per_document(mask, parts))
    assert max(found) - mask.area / parts <= 2 * mask.tokens


def test_per_document_deals_the_tokens_that_are_left_to_the_next_ranks() -> None:
    assert per_document(Mask.documents([1, 1, 4]), 3) == [((0, 1), (2, 3)), ((1, 2), (3, 4)), ((4, 6),)]
    held = [len(tokens_of(runs)) for runs in per_document(Mask.documents([1] * 9), 3)]
    assert held == [3, 3, 3]


@draws
@given(masks, st.integers(1, 12))
def test_locality_shares_the_work_of_any_mask_up_to_a_few_tokens(mask: Mask, parts: int) -> None:
    # A window is half of one token's work off, 1/(ranks left) of which each rank after it takes over; and a rank may
    # hold one token less than another.
    heaviest = int(mask.dense().sum(1).max()) if mask.tokens else 0
    found = work(mask, locality(mask, parts))
    most = (heaviest / 2 + 1) * (log(parts) + 2) + heaviest
    assert all(abs(pairs - mask.area / parts) <= most for pairs in found)


@draws
@given(st.integers(1, 30), parts)
def test_locality_keeps_equal_documents_whole(length: int, parts: int) -> None:
    mask = Mask.documents([length] * (3 * parts))
    assert received(mask, locality(mask, parts)) == [0] * parts


def test_locality_fills_up_with_tokens_that_nobody_sees() -> None:
    mask = Mask.intervals(16, [((4, 8), (4, 8), "causal")])
    assignment = locality(mask, 2)
    assert [len(tokens_of(runs)) for runs in assignment] == [8, 8]
    assert work(mask, assignment) == [4, 6]


@pytest.mark.parametrize("ranks", [8, 16, 32])
def test_locality_of_packed_documents_is_balanced_and_sends_a_fifth_of_the_ring(ranks: int) -> None:
    balance, traffic, worst = [], [], []
    for seed in range(20):
        mask = packing(seed)
        assignment = locality(mask, ranks)
        pairs, keys, ring = work(mask, assignment), received(mask, assignment), mask.tokens * (1 - 1 / ranks)
        balance.append(max(pairs) * ranks / mask.area)
        traffic.append(np.mean(keys) / ring)
        worst.append(max(keys) / ring)
    assert max(balance) <= 1.001
    assert np.mean(traffic) <= 0.22
    assert np.mean(worst) <= 0.32


def test_slack_trades_balance_for_traffic() -> None:
    masks, ranks = [packing(seed) for seed in range(8)], 16
    traffic = []
    for slack in (0.0, 0.1, 0.5):
        assignments = [locality(mask, ranks, slack=slack) for mask in masks]
        for mask, assignment in zip(masks, assignments, strict=True):
            assert max(work(mask, assignment)) * ranks / mask.area <= 1 + slack + 0.001
            assert sum(after - first for runs in assignment for first, after in runs) == mask.tokens
        traffic.append(sum(sum(received(mask, one)) for mask, one in zip(masks, assignments, strict=True)))
    assert traffic[0] > 1.04 * traffic[1] and traffic[1] > 1.1 * traffic[2]


# ----------------------------------------------------------------------------------------------------------- the rest


def test_keys_of_a_band_are_needed_after_shorter_ones_that_begin_later() -> None:
    mask = Mask.intervals(12, [((0, 12), (0, 2), "full"), ((2, 4), (4, 6), "full")])
    assert keys_needed(mask, ((8, 12),)) == ((0, 2),)
    assert keys_needed(mask, ((3, 4), (8, 12))) == ((0, 2), (4, 6))


@draws
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), max_size=5), parts)
def test_cut_gives_the_tokens_in_order_and_evenly(gaps: list[tuple[int, int]], parts: int) -> None:
    runs: list[Interval] = []
    for gap, length in gaps:
        first = (runs[-1][1] if runs else 0) + gap
        runs.append((first, first + length))
    shares = cut(runs, parts)
    sizes = [len(tokens_of(share)) for share in shares]
    assert [token for share in shares for token in tokens_of(share)] == tokens_of(tuple(runs))
    assert len(shares) == parts
    assert max(sizes) - min(sizes) <= 1
    assert all(first < after for share in shares for first, after in share)


def test_an_unknown_balance_is_refused() -> None:
    with pytest.raises(
        PlanError,
        match="balance='stripe' is not a way to share tokens. "
        "Choose one of contiguous, zigzag, per_document, locality.",
    ):
        assign(Mask.causal(4), 2, balance="stripe")  # type: ignore[arg-type]
