"""What attention sends, against closed forms from the literature, for many shapes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.mask import Mask
from meshkit.parallel.context import Layout, Shape, choose, traffic
from meshkit.parallel.context._assign import received
from meshkit.parallel.context._traffic import total
from meshkit.strategy import ContextPolicy
from tests.test_mask import masks

draws = settings(deadline=None)  # a busy machine

head_dims = st.sampled_from([1, 8, 64, 128])
kv_heads = st.sampled_from([1, 2, 3, 4, 8, 16])
ratios = st.sampled_from([1, 2, 4, 7])
halves = st.integers(1, 9)  # of a rank's tokens, so that zigzag is even


@st.composite
def evenly_read_heads(draw: st.DrawFn, ranks: int) -> tuple[int, int]:
    """(query, key/value) heads that Ulysses over these ranks splits evenly: no rank reads a part of another's."""
    divisors = [kv for kv in range(1, ranks) if ranks % kv == 0]
    kv = draw(st.sampled_from(divisors) | st.integers(1, 3).map(lambda times: times * ranks))
    step = ranks // kv if kv < ranks else 1
    return kv * step * draw(st.integers(1, 4)), kv


def even(ranks: int, half: int, shape: Shape, mask: Mask | None = None, **policy: object) -> Layout:
    """A layout of 2 * half tokens on every rank; causal and zigzag unless told otherwise."""
    mask = mask or Mask.causal(2 * half * ranks)
    chosen = ContextPolicy(**{"balance": "zigzag", **policy})  # type: ignore[arg-type]
    layout = choose(mask, ranks, chosen, shape).layout
    assert set(layout.lengths) == {2 * half}
    return layout


def sent(layout: Layout, shape: Shape) -> set[int]:
    """Bytes of forward and backward; one number where all ranks send alike."""
    return {sum(map(total, traffic(layout, rank, shape))) for rank in range(layout.ranks)}


def operations(layout: Layout, shape: Shape, rank: int) -> set[str]:
    forward, backward = traffic(layout, rank, shape)
    return {name for name, _ in [*forward, *backward]}


@draws
@given(st.integers(2, 9), kv_heads, ratios, head_dims, halves)
def test_a_ring_sends_keys_twice_and_fp32_gradients_once_round(
    ranks: int, kv: int, ratio: int, head_dim: int, half: int
) -> None:
    shape = Shape(heads=kv * ratio, kv_heads=kv, head_dim=head_dim)
    layout = even(ranks, half, shape, scheme="ring")
    assert sent(layout, shape) == {2 * half * kv * head_dim * (16 * ranks - 8)}
    assert operations(layout, shape, 0) == {"send"}
    forward, _ = traffic(layout, 0, shape)
    assert total(forward) == 4 * (ranks - 1) * 2 * half * kv * head_dim


@draws
@given(st.integers(2, 8), kv_heads, ratios, head_dims, halves, st.integers(1, 3))
def test_bytes_grow_with_rows_and_the_size_of_numbers(
    ranks: int, kv: int, ratio: int, head_dim: int, half: int, rows: int
) -> None:
    shape = Shape(heads=kv * ratio, kv_heads=kv, head_dim=head_dim, rows=rows, itemsize=8, sum_itemsize=8)
    layout = even(ranks, half, shape, scheme="ring")
    assert sent(layout, shape) == {rows * 2 * half * kv * head_dim * (32 * (ranks - 1) + 16 * ranks)}


@draws
@given(st.integers(2, 16), head_dims, halves, st.data())
def test_ulysses_sends_every_head_four_times(ranks: int, head_dim: int, half: int, data: st.DataObject) -> None:
    heads, kv = data.draw(evenly_read_heads(ranks))
    shape = Shape(heads=heads, kv_heads=kv, head_dim=head_dim)
    layout = even(ranks, half, shape, scheme="ulysses")
    copies = kv if kv >= ranks else ranks
    assert sent(layout, shape) == {8 * (ranks - 1) * 2 * half * head_dim * (heads + copies) // ranks}
    assert operations(layout, shape, 0) == {"all_to_all"}


@draws
@given(st.integers(2, 6), st.integers(2, 4), head_dims, halves, st.data())
def test_two_dimensions_send_the_sum_of_both(
    ulysses: int, rings: int, head_dim: int, half: int, data: st.DataObject
) -> None:
    heads, kv = data.draw(evenly_read_heads(ulysses))
    shape = Shape(heads=heads, kv_heads=kv, head_dim=head_dim)
    layout = even(ulysses * rings, half, shape, scheme="ring", ulysses=ulysses)
    tokens, copies = 2 * half, kv if kv >= ulysses else ulysses
    traded = 8 * (ulysses - 1) * tokens * head_dim * (heads + copies) // ulysses
    assert sent(layout, shape) == {traded + tokens * copies * head_dim * (16 * rings - 8)}


@draws
@given(st.integers(2, 9), kv_heads, ratios, head_dims, halves, st.integers(1, 5))
def test_all_gather_counts_whole_tensors_of_a_few_heads(
    ranks: int, kv: int, ratio: int, head_dim: int, half: int, at_a_time: int
) -> None:
    shape = Shape(heads=kv * ratio, kv_heads=kv, head_dim=head_dim)
    layout = even(ranks, half, shape, scheme="all_gather", kv_heads_per_gather=at_a_time)
    whole = ranks * 2 * half * kv * head_dim  # elements of k, of all ranks
    assert sent(layout, shape) == {2 * 2 * 2 * whole + 2 * 4 * whole}
    forward, backward = traffic(layout, 0, shape)
    sets = -(-kv // at_a_time)
    assert sum(forward.values()) == sets
    assert sum(backward.values()) == 2 * sets


@draws
@given(st.integers(2, 9), kv_heads, head_dims, halves)
def test_a_cast_of_a_full_mask_is_a_ring_less_the_hop_home(ranks: int, kv: int, head_dim: int, half: int) -> None:
    shape = Shape(heads=kv, kv_heads=kv, head_dim=head_dim)
    mask = Mask.full(2 * half * ranks)
    ring, cast = (sent(even(ranks, half, shape, mask, scheme=name), shape) for name in ("ring", "group_cast"))
    assert ring == {size + 8 * 2 * half * kv * head_dim for size in cast}


@draws
@given(st.integers(2, 9), kv_heads, head_dims, halves)
def test_a_cast_of_contiguous_causal_tokens_sends_each_key_to_those_after_it(
    ranks: int, kv: int, head_dim: int, half: int
) -> None:
    # Keys to the ranks - 1 - r after r, in forward and backward; fp32 gradients to the r before it.
    shape = Shape(heads=kv, kv_heads=kv, head_dim=head_dim)
    layout = even(ranks, half, shape, scheme="group_cast", balance="contiguous")
    assert sent(layout, shape) == {8 * (ranks - 1) * 2 * half * kv * head_dim}


@draws
@given(masks, st.integers(1, 6), st.sampled_from(["contiguous", "zigzag", "per_document", "locality"]))
def test_a_cast_sends_what_is_needed_and_never_more_than_a_ring(mask: Mask, ranks: int, balance: str) -> None:
    shape = Shape(heads=2, kv_heads=1, head_dim=4)
    cast, ring = (
        choose(mask, ranks, ContextPolicy(scheme=scheme, balance=balance), shape).layout  # type: ignore[arg-type]
        for scheme in ("group_cast", "ring")
    )
    forwards = [traffic(cast, rank, shape)[0] for rank in range(ranks)]
    assert sum(map(total, forwards)) == sum(received(mask, cast.runs)) * 2 * 4 * 2
    for which in (0, 1):
        cast_bytes, ring_bytes = (
            sum(total(traffic(layout, rank, shape)[which]) for rank in range(ranks)) for layout in (cast, ring)
        )
        assert cast_bytes <= ring_bytes


@pytest.mark.parametrize("scheme", ["auto", "ring", "all_gather", "group_cast", "ulysses"])
def test_one_rank_sends_nothing(scheme: str) -> None:
    shape = Shape(heads=4, kv_heads=2, head_dim=8)
    layout = choose(Mask.causal(10), 1, ContextPolicy(scheme=scheme), shape).layout  # type: ignore[arg-type]
    assert traffic(layout, 0, shape) == ({}, {})


@pytest.mark.parametrize(("ranks", "ring", "ulysses"), [(2, 192, 160), (4, 448, 240), (8, 960, 280), (16, 1984, 360)])
def test_the_table_of_ring_and_ulysses(ranks: int, ring: int, ulysses: int) -> None:
    """32 query and 8 key/value heads, in units of s * d bytes."""
    shape = Shape(heads=32, kv_heads=8, head_dim=1)
    assert sent(even(ranks, 1, shape, scheme="ring"), shape) == {2 * ring}
    assert sent(even(ranks, 1, shape, scheme="ulysses"), shape) == {2 * ulysses}


def test_auto_takes_what_sends_least() -> None:
    shape = Shape(heads=32, kv_heads=8, head_dim=64)
    short = choose(Mask.documents([8] * 16), 8, ContextPolicy(), shape)  # documents that ranks hold whole
    assert sent(short.layout, shape) == {0}
    long = choose(Mask.causal(1024), 8, ContextPolicy(), shape)
    assert long.scheme == "ulysses"
    assert "the fewest" in str(long)
