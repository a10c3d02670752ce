"""A mask is what its words say: every constructor against a table of pairs filled in one by one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise, product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import meshkit as mk
from meshkit.mask import FAR, Band, Mask
from meshkit.models import llama
from meshkit.models.llama import Llama
from tests.tiny import tiny_config

draws = settings(deadline=None)  # a busy machine
TOL_FP64_SUM = 1e-12  # only the order of summation differs

lengths = st.lists(st.integers(0, 8), max_size=5)
windows = st.none() | st.integers(1, 9)
kinds = st.sampled_from(["causal", "full"])


@st.composite
def bands(draw: st.DrawFn, tokens: int) -> Band:
    q0, q1 = sorted(draw(st.tuples(st.integers(0, tokens), st.integers(0, tokens))))
    k0, k1 = sorted(draw(st.tuples(st.integers(0, tokens), st.integers(0, tokens))))
    low = draw(st.just(-FAR) | st.integers(-tokens - 1, tokens + 1))
    high = draw(st.just(FAR) | st.integers(-tokens - 1, tokens + 1))
    return Band(q0, q1, k0, k1, low, high)


@st.composite
def grids(draw: st.DrawFn, max_tokens: int = 18) -> Mask:
    """Disjoint bands of any bounds: a grid of rectangles, each with up to two bands on both sides of a diagonal."""
    tokens = draw(st.integers(0, max_tokens))
    rows, columns = (sorted({0, tokens, *draw(st.sets(st.integers(0, tokens), max_size=3))}) for _ in range(2))
    entries = []
    for (q0, q1), (k0, k1) in product(pairwise(rows), pairwise(columns)):
        edges = sorted(draw(st.lists(st.integers(-tokens, tokens), max_size=2)))
        cuts = [-FAR, *edges, FAR]
        for low, high in pairwise(cuts):
            if draw(st.booleans()):
                entries.append(Band(q0, q1, k0, k1, low if low == -FAR else low + 1, high))
    return Mask.intervals(tokens, draw(st.permutations(entries)))


@st.composite
def prefix_lms(draw: st.DrawFn) -> Mask:
    documents = draw(lengths)
    return Mask.prefix_lm(documents, [draw(st.integers(0, length)) for length in documents])


masks = st.one_of(st.builds(Mask.documents, lengths, window=windows, kind=kinds), prefix_lms(), grids())


def table(tokens: int, sees: Callable[[int, int], bool]) -> Tensor:
    """[query, key], every pair asked for on its own."""
    asked = [[sees(query, key) for key in range(tokens)] for query in range(tokens)]
    return torch.tensor(asked, dtype=torch.bool).reshape(tokens, tokens)


def pairs(band: Band | None) -> set[tuple[int, int]]:
    if band is None:
        return set()
    inside = product(range(band.q0, band.q1), range(band.k0, band.k1))
    return {(query, key) for query, key in inside if band.low <= key - query <= band.high}


def document_of(sizes: list[int]) -> list[int]:
    return [index for index, size in enumerate(sizes) for _ in range(size)]


def near(query: int, key: int, window: int | None) -> bool:
    return window is None or query - key < window


# -------------------------------------------------------------------------------------------------------- constructors


@draws
@given(st.integers(0, 20), windows)
def test_causal_shows_a_token_and_what_came_before_it(tokens: int, window: int | None) -> None:
    expected = table(tokens, lambda query, key: key <= query and near(query, key, window))
    assert torch.equal(Mask.causal(tokens, window=window).dense(), expected)


@draws
@given(st.integers(0, 20))
def test_full_shows_everything(tokens: int) -> None:
    assert Mask.full(tokens).dense().all()


@draws
@given(lengths, windows, kinds)
def test_documents_do_not_see_each_other(sizes: list[int], window: int | None, kind: str) -> None:
    document = document_of(sizes)

    def sees(query: int, key: int) -> bool:
        return (
            document[query] == document[key]
            and (kind == "full" or key <= query)
            and near(query, key, window)  # full: keys after the query are not `window` before it
        )

    mask = Mask.documents(sizes, window=window, kind=kind)  # type: ignore[arg-type]
    assert torch.equal(mask.dense(), table(sum(sizes), sees))


@draws
@given(lengths, st.data())
def test_a_prefix_is_seen_by_all_of_its_document(sizes: list[int], data: st.DataObject) -> None:
    prefixes = [data.draw(st.integers(0, size)) for size in sizes]
    document, starts = document_of(sizes), list(accumulate(sizes, initial=0))

    def sees(query: int, key: int) -> bool:
        own = document[query]
        return own == document[key] and (key - starts[own] < prefixes[own] or key <= query)

    assert torch.equal(Mask.prefix_lm(sizes, prefixes).dense(), table(sum(sizes), sees))


@draws
@given(st.integers(0, 12), st.data())
def test_intervals_show_their_union_and_refuse_a_pair_shown_twice(tokens: int, data: st.DataObject) -> None:
    entries = data.draw(st.lists(bands(tokens), max_size=4))
    shown = [pair for band in entries for pair in pairs(band)]
    if len(shown) > len(set(shown)):
        with pytest.raises(mk.errors.PlanError, match="both show some pair of query and key. Make them disjoint."):
            Mask.intervals(tokens, entries)
    else:
        expected = table(tokens, lambda query, key: (query, key) in set(shown))
        assert torch.equal(Mask.intervals(tokens, entries).dense(), expected)


@draws
@given(st.integers(1, 12), st.data(), kinds)
def test_an_interval_is_causal_over_the_whole_sequence(tokens: int, data: st.DataObject, kind: str) -> None:
    band = data.draw(bands(tokens))
    queries, keys = (band.q0, band.q1), (band.k0, band.k1)

    def sees(query: int, key: int) -> bool:
        inside = queries[0] <= query < queries[1] and keys[0] <= key < keys[1]
        return inside and (kind == "full" or key <= query)

    mask = Mask.intervals(tokens, [(queries, keys, kind)])  # type: ignore[list-item]
    assert torch.equal(mask.dense(), table(tokens, sees))


@draws
@given(st.integers(1, 3), st.integers(0, 7), windows, st.data())
def test_a_document_starts_where_positions_do_not_go_on(
    rows: int, tokens: int, window: int | None, data: st.DataObject
) -> None:
    jumps = [
        data.draw(st.lists(st.sampled_from([1, 1, 1, 0, -2, 3]), min_size=tokens, max_size=tokens)) for _ in range(rows)
    ]
    position_ids = torch.tensor(jumps, dtype=torch.int64).reshape(rows, tokens).cumsum(1)

    def sees(query: int, key: int) -> bool:
        if key > query or not near(query, key, window) or query // tokens != key // tokens:
            return False
        row = jumps[query // tokens]
        return all(row[step % tokens] == 1 for step in range(key + 1, query + 1))

    mask = Mask.from_positions(position_ids, window=window)
    assert torch.equal(mask.dense(), table(rows * tokens, sees))


@draws
@given(masks, st.integers(1, 12))
def test_a_window_hides_keys_so_far_before_their_query(mask: Mask, window: int) -> None:
    before = mask.dense()
    expected = table(mask.tokens, lambda query, key: bool(before[query, key]) and near(query, key, window))
    assert torch.equal(mask.windowed(window).dense(), expected)
    assert mask.windowed(window).windowed(window).dense().equal(expected)
    assert mask.windowed(None) is mask


@draws
@given(masks, st.integers(1, 9), st.integers(0, 4))
def test_sinks_are_the_first_tokens_of_each_document(mask: Mask, window: int, sinks: int) -> None:
    firsts = {token: first for first, after in mask.components for token in range(first, after)}
    shown = mask.dense()
    expected = table(
        mask.tokens,
        lambda query, key: bool(shown[query, key]) and (query - key < window or key < firsts[key] + sinks),
    )
    cut = mask.windowed(window, sinks=sinks)
    assert torch.equal(cut.dense(), expected)
    assert cut.area == int(expected.sum()), "bands overlap"
    assert Mask.causal(12, window=3, sinks=2) == Mask.documents([12]).windowed(3, sinks=2)


def test_sinks_without_a_window_are_refused() -> None:
    with pytest.raises(mk.errors.PlanError, match="sinks=2 are kept beside a window, and there is none"):
        Mask.causal(12, sinks=2)
    with pytest.raises(mk.errors.PlanError, match="-1 sinks cannot be"):
        Mask.causal(12, window=3, sinks=-1)


@draws
@given(st.lists(masks, max_size=4))
def test_joined_masks_lie_on_the_diagonal(several: list[Mask]) -> None:
    expected = torch.block_diag(*(mask.dense().int() for mask in several)).bool() if several else torch.zeros(0, 0)
    found = Mask.joined(several).dense()
    assert found.shape[0] == sum(mask.tokens for mask in several)
    assert torch.equal(found, expected[: found.shape[0], : found.shape[0]].bool())


# ----------------------------------------------------------------------------------------------------------- arithmetic


@draws
@given(masks)
def test_area_counts_visible_pairs(mask: Mask) -> None:
    assert mask.area == int(mask.dense().sum())
    assert [band.area for band in mask.bands] == [len(pairs(band)) for band in mask.bands]


@draws
@given(st.integers(0, 10).flatmap(bands))
def test_area_of_a_band_that_nobody_clipped(band: Band) -> None:
    assume(band.low <= band.high)
    assert band.area == len(pairs(band))


def test_a_band_whose_bounds_exclude_each_other_has_no_area() -> None:
    assert Band(0, 4, 0, 4, low=2, high=-1).area == 0


@draws
@given(masks)
def test_every_visible_pair_lies_in_one_component(mask: Mask) -> None:
    components = mask.components
    assert all(first < after for first, after in components)
    assert all(after <= first for (_, after), (first, _) in pairwise(components))
    inside = torch.zeros(mask.tokens, mask.tokens, dtype=torch.bool)
    for first, after in components:
        inside[first:after, first:after] = True
    assert not (mask.dense() & ~inside).any()
    seen = mask.dense().any(0) | mask.dense().any(1)
    for first, after in components:  # and none is wider than it must be
        assert seen[first]
        assert seen[after - 1]


@draws
@given(lengths, kinds, st.data())
def test_the_components_of_documents_are_the_documents(sizes: list[int], kind: str, data: st.DataObject) -> None:
    expected = tuple((first, after) for first, after in pairwise(accumulate(sizes, initial=0)) if first < after)
    assert Mask.documents(sizes, kind=kind).components == expected  # type: ignore[arg-type]
    prefixes = [data.draw(st.integers(0, size)) for size in sizes]
    assert Mask.prefix_lm(sizes, prefixes).components == expected


def test_components_that_overlap_are_one() -> None:
    across = Mask.intervals(9, [((0, 2), (6, 7), "full"), ((3, 4), (3, 4), "full"), Band(7, 9, 7, 9)])
    assert across.components == ((0, 7), (7, 9))


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 10).flatmap(lambda tokens: st.tuples(bands(tokens), bands(tokens))), st.booleans())
def test_a_clipped_band_is_exact_and_tight(both: tuple[Band, Band], whole: bool) -> None:
    band, (q0, q1, k0, k1, _, _) = both
    if whole:  # two random rectangles seldom meet
        q0, q1, k0, k1 = band[:4]
    clipped = band.clip((q0, q1), (k0, k1))
    expected = {(query, key) for query, key in pairs(band) if q0 <= query < q1 and k0 <= key < k1}
    assert pairs(clipped) == expected
    assert (clipped is None) == (not expected)
    if clipped is None:
        return
    assert {query for query, _ in expected} == set(range(clipped.q0, clipped.q1))
    assert {key for _, key in expected} == set(range(clipped.k0, clipped.k1))
    # A bound stands where it hides some pair of the rectangle, and only there.
    furthest, nearest = clipped.k0 - (clipped.q1 - 1), clipped.k1 - 1 - clipped.q0
    assert clipped.low == (band.low if band.low > furthest else -FAR)
    assert clipped.high == (band.high if band.high < nearest else FAR)
    assert clipped.clip((clipped.q0, clipped.q1), (clipped.k0, clipped.k1)) == clipped


@draws
@given(st.integers(0, 10).flatmap(bands), st.integers(-20, 20), st.integers(-20, 20))
def test_a_moved_band_shows_the_same_pairs_elsewhere(band: Band, queries: int, keys: int) -> None:
    assert pairs(band.moved(queries, keys)) == {(query + queries, key + keys) for query, key in pairs(band)}


@draws
@given(st.integers(2, 20))
def test_only_plain_causal_attention_is_plain(tokens: int) -> None:
    assert Mask.causal(tokens).is_causal
    assert Mask.causal(tokens, window=tokens).is_causal
    assert not Mask.full(tokens).is_causal
    assert not Mask.causal(tokens, window=tokens - 1).is_causal
    assert not Mask.documents([1, tokens - 1]).is_causal


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(mk.errors.PlanError, match=r"Mask.documents: a document has length -2. Lengths are at least 0."):
        Mask.documents([3, -2])
    with pytest.raises(mk.errors.PlanError, match="a document has length -1"):
        Mask.causal(-1)


def test_an_unknown_kind_of_document_is_refused() -> None:
    with pytest.raises(mk.errors.PlanError, match="casual"):
        Mask.documents([3], kind="casual")  # type: ignore[arg-type]


def test_prefixes_must_fit_their_documents() -> None:
    with pytest.raises(mk.errors.PlanError, match=r"Mask.prefix_lm: 2 lengths, but 1 prefixes. Give one for each."):
        Mask.prefix_lm([3, 4], [1])
    with pytest.raises(
        mk.errors.PlanError, match=r"Mask.prefix_lm: a prefix of 5 tokens does not fit a document of 4."
    ):
        Mask.prefix_lm([3, 4], [1, 5])
    with pytest.raises(mk.errors.PlanError, match="a prefix of -1 tokens does not fit"):
        Mask.prefix_lm([3], [-1])


def test_an_interval_has_a_known_kind() -> None:
    with pytest.raises(
        mk.errors.PlanError,
        match=r"Mask.intervals: kind 'stripe' is neither 'full' nor 'causal'. Use a Band for others.",
    ):
        Mask.intervals(4, [((0, 4), (0, 4), "stripe")])  # type: ignore[list-item]


@pytest.mark.parametrize("queries", [(-1, 2), (0, 5), (3, 1)])
def test_an_interval_lies_in_the_sequence(queries: tuple[int, int]) -> None:
    text = rf"Mask.intervals: Band\(q0={queries[0]}, q1={queries[1]}, k0=0, k1=4.* lies outside of the 4 tokens."
    with pytest.raises(mk.errors.PlanError, match=text):
        Mask.intervals(4, [(queries, (0, 4), "full")])
    with pytest.raises(mk.errors.PlanError, match="lies outside of the 4 tokens."):
        Mask.intervals(4, [((0, 4), queries, "full")])


def test_entries_that_show_a_pair_twice_are_named() -> None:
    text = r"Mask.intervals: Band\(q0=2, q1=4.* and Band\(q0=0, q1=3.* both show some pair of query and key."
    with pytest.raises(mk.errors.PlanError, match=text):
        Mask.intervals(4, [((0, 3), (0, 3), "full"), ((2, 4), (2, 4), "causal")])


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_shows_something(window: int) -> None:
    text = rf"Mask: a window of {window} tokens shows nothing. Give at least 1, or None."
    with pytest.raises(mk.errors.PlanError, match=text):
        Mask.causal(4, window=window)


# ------------------------------------------------------------------------------------------------- a model on one device


def model_and_ids(window: int | None = None) -> tuple[Llama, Tensor]:
    config = tiny_config(vocab_size=23, intermediate_size=20, sliding_window=window)
    torch.manual_seed(0)
    return Llama(config).double(), torch.randint(0, 23, (3, 11))


def dense_logits(model: Llama, ids: Tensor, shown_BTS: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The model with its attention written out over a table, whatever mask it makes."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        ratio = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(ratio, 2), v.repeat_interleave(ratio, 2)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        p = scores.masked_fill(~shown_BTS.unsqueeze(1), float("-inf")).softmax(-1)
        return torch.einsum("bhts,bshd->bthd", p, v)

    with monkeypatch.context() as patch:
        patch.setattr(llama, "attention", attention)
        logits: Tensor = model(ids)
    return logits


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (Mask.prefix_lm([11], [4]), None),
        (Mask.prefix_lm([6, 5], [2, 0]), None),
        (Mask.causal(11, window=3), None),
        (Mask.causal(11), 4),
        (Mask.full(11), 4),
        (Mask.documents([2, 1, 8]), None),
        (Mask.causal(11), None),
    ],
)
def test_a_model_on_one_device_follows_a_mask_for_every_row(mask, window, monkeypatch) -> None:
    model, ids = model_and_ids(window)
    expected = dense_logits(model, ids, mask.windowed(window).dense().expand(3, 11, 11), monkeypatch)
    assert torch.allclose(model(ids, mask=mask), expected, rtol=0, atol=TOL_FP64_SUM)


def test_a_model_on_one_device_follows_a_mask_of_rows_end_to_end(monkeypatch) -> None:
    model, ids = model_and_ids()
    rows = [Mask.documents([4, 7]), Mask.prefix_lm([11], [5]), Mask.causal(11, window=2)]
    expected = dense_logits(model, ids, torch.stack([row.dense() for row in rows]), monkeypatch)
    assert torch.allclose(model(ids, mask=Mask.joined(rows)), expected, rtol=0, atol=TOL_FP64_SUM)


def test_a_model_on_one_device_refuses_a_mask_of_other_tokens() -> None:
    model, ids = model_and_ids()
    text = (
        r"the mask is of 12 tokens, but the batch has 3 rows of 11. Give a mask of 11 tokens for every row, or of all 33 "
        "tokens, rows end to end."
    )
    with pytest.raises(mk.errors.PlanError, match=text):
        model(ids, mask=Mask.causal(12))


def test_a_mask_that_shows_one_row_to_another_is_refused() -> None:
    model, ids = model_and_ids()
    with pytest.raises(mk.errors.PlanError):
        model(ids, mask=Mask.causal(33))
