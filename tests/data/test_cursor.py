"""The shuffle is a permutation, and looks like any other."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.data._cursor import permute


@settings(deadline=None)
@given(count=st.integers(1, 700), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
def test_every_epoch_holds_every_sample_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(permute(i, count, seed=seed, epoch=epoch) for i in range(count)) == list(range(count))


@settings(deadline=None)
@given(index=st.integers(0, 10**15 - 1))
def test_any_place_of_a_huge_corpus_is_reached_at_once(index: int) -> None:
    assert 0 <= permute(index, 10**15, seed=0, epoch=0) < 10**15


def test_all_orders_are_about_equally_likely() -> None:
    seeds = 6000
    seen = Counter(tuple(permute(i, 4, seed=seed, epoch=0) for i in range(4)) for seed in range(seeds))
    expected = seeds / 24
    chi_squared = sum((seen[order] - expected) ** 2 / expected for order in permutations(range(4)))
    assert chi_squared < 49.7  # the 0.999 quantile for 23 degrees of freedom


def test_epochs_and_seeds_keep_as_few_places_as_independent_orders() -> None:
    count, epochs = 500, 40
    orders = [[permute(i, count, seed=1, epoch=epoch) for i in range(count)] for epoch in range(epochs)]
    orders.append([permute(i, count, seed=2, epoch=0) for i in range(count)])
    orders.append(list(range(count)))
    kept = [sum(a == b for a, b in zip(one, two, strict=True)) for one, two in permutations(orders, 2)]
    mean = sum(kept) / len(kept)
    assert abs(mean - 1) < 0.1  # independent orders agree in 1 place on average; 861 pairs give 0.034 of spread
    neighbours = sum(abs(a - b) == 1 for order in orders[:-1] for a, b in pairwise(order))
    assert abs(neighbours / (epochs + 1) - 2) < 1  # independent orders keep 2 pairs of neighbours together
