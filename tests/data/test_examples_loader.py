"""One sequence of steps of examples, on any number of ranks, from any step again."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.data import Example, ExampleLoader, Pair, Unit, example_batches
from meshkit.data.bins import first_fit_decreasing
from meshkit.errors import DataError

UNITS = 11
SEQ_LEN = 20
packings = st.sampled_from(["rows", "step", "balanced", "none"])


def unit(number: int, *, pair: bool = False) -> Unit:
    """All of its ids say which it is; ragged lengths."""

    def one(length: int, side: int) -> Example:
        ids = np.full(length, 2 * number + side + 1)
        return Example(ids=ids, learn=np.arange(length) > 0, source=f"u:{number}", scalars={"which": float(number)})

    length = 1 + number * 5 % 9
    return Pair(one(length, 0), one(1 + number % 4, 1)) if pair else one(length, 0)


SINGLES = [unit(number) for number in range(UNITS)]
PAIRS = [unit(number, pair=True) for number in range(UNITS)]


def loader(units: list[Unit] = PAIRS, **changes: Any) -> ExampleLoader:
    return ExampleLoader(units, **{"seq_len": SEQ_LEN, "global_batch": 4, "seed": 0, **changes})


def seen(batch: dict[str, torch.Tensor]) -> list[int]:
    """Which units are in a batch, by the ends of chosen ones."""
    chosen = (batch["ends"] == 1) & (batch["segment_ids"] % 2 == 1)
    return batch["which"][chosen].int().tolist()


@settings(deadline=None, max_examples=25)
@given(
    global_batch=st.integers(1, 9),
    ranks=st.integers(1, 12),
    seed=st.integers(0, 99),
    packing=st.sampled_from(["rows", "step", "none"]),  # balanced rows depend on the ranks
    pair=st.booleans(),
)
def test_ranks_together_hold_the_global_batch_of_one_rank(
    global_batch: int, ranks: int, seed: int, packing: str, pair: bool
) -> None:
    choices = {"global_batch": global_batch, "seed": seed, "packing": packing}
    units = PAIRS if pair else SINGLES
    whole = loader(units, **choices)
    parts = [loader(units, **choices, rank=r, ranks=ranks) for r in range(ranks)]
    for expected, *batches in islice(zip(whole, *parts, strict=True), 4):
        for name in expected.keys() - {"segment_ids"}:
            assert torch.equal(torch.cat([batch[name] for batch in batches]), expected[name])
        before = 0
        for batch in batches:  # segments are numbered from 1 on each rank
            ids = batch["segment_ids"]
            assert set(ids[ids > 0].tolist()) == set(range(1, int(batch["ends"].sum()) + 1))
            rows = expected["segment_ids"][before : before + len(ids)]
            offset = rows[rows > 0].min() - 1 if (rows > 0).any() else 0
            assert torch.equal(ids, torch.where(rows > 0, rows - offset, 0))
            before += len(ids)
        counts = [len(batch["labels"]) for batch in batches]
        assert max(counts) - min(counts) <= 1
        if pair:
            assert all(batch["ends"].sum() % 2 == 0 for batch in batches)  # no pair on two ranks


@settings(deadline=None, max_examples=25)
@given(packing=packings, global_batch=st.integers(1, 30), seed=st.integers(0, 99))
def test_each_epoch_holds_each_unit_once_and_steps_run_across(packing: str, global_batch: int, seed: int) -> None:
    data = loader(packing=packing, global_batch=global_batch, seed=seed)
    count = data.samples_per_epoch
    assert packing == "rows" or count == UNITS
    stream = [number for batch in islice(data, count) for number in seen(batch)]
    assert data.epoch == global_batch
    assert sorted(stream) == sorted(list(range(UNITS)) * global_batch)


def test_a_step_of_units_has_so_many_units_and_a_step_of_rows_so_many_rows() -> None:
    for batch in islice(loader(packing="step"), 9):
        assert len(seen(batch)) == 4
        assert batch["labels"].shape[1] <= SEQ_LEN
    for batch in islice(loader(packing="rows"), 9):
        assert batch["labels"].shape == (4, SEQ_LEN)
    for batch in islice(loader(packing="none", pad_multiple=4), 9):
        assert len(seen(batch)) == len(batch["labels"]) == 4
        longest = int((batch["segment_ids"] > 0).sum(dim=1).max())
        assert batch["labels"].shape[1] == -(-longest // 4) * 4


@pytest.mark.parametrize("multiple", [1, 4])
def test_rows_of_a_step_are_few_and_then_short(multiple: int) -> None:
    for batch in islice(loader(SINGLES, packing="step", pad_multiple=multiple, global_batch=7), 9):
        segments = batch["segment_ids"]
        sizes = torch.bincount(segments.flatten())[1:].tolist()
        rows, length = segments.shape
        assert rows == len(first_fit_decreasing(sizes, SEQ_LEN))
        assert length <= SEQ_LEN and length % multiple == 0
        shorter = length - multiple
        assert shorter < max(sizes) or len(first_fit_decreasing(sizes, shorter)) > rows


def test_the_same_units_make_a_step_packed_and_unpacked() -> None:
    for packed, unpacked in islice(zip(loader(packing="step"), loader(packing="none"), strict=True), 9):
        assert sorted(seen(packed)) == sorted(seen(unpacked))
        assert (packed["labels"] != -100).sum() == (unpacked["labels"] != -100).sum()


@settings(deadline=None, max_examples=25)
@given(
    packing=packings,
    before=st.integers(0, 6),
    batches=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    ranks=st.integers(1, 4),
)
def test_resume_goes_on_with_the_same_units_on_other_ranks_and_batches(
    packing: str, before: int, batches: tuple[int, int], ranks: int
) -> None:
    first = loader(packing=packing, global_batch=batches[0])
    for _ in islice(first, before):
        pass
    state = json.loads(json.dumps(first.state_dict()))
    assert (
        state
        == loader_after(before, packing=packing, global_batch=batches[0], rank=ranks - 1, ranks=ranks).state_dict()
    )
    start = before * batches[0]
    parts = [loader(packing=packing, global_batch=batches[1], rank=r, ranks=ranks) for r in range(ranks)]
    for part in parts:
        part.load_state_dict(state)
    one = loader(packing=packing, global_batch=1)
    stream = [sorted(seen(batch)) for batch in islice(one, start + 3 * batches[1])][start:]
    for step in range(3):
        expected = [number for each in stream[step * batches[1] : (step + 1) * batches[1]] for number in each]
        assert sorted(number for part in parts for number in seen(next(part))) == sorted(expected)


def loader_after(steps: int, **changes: Any) -> ExampleLoader:
    data = loader(**changes)
    for _ in islice(data, steps):
        pass
    return data


def test_order_changes_with_the_epoch_and_the_seed_only() -> None:
    def order(**changes: Any) -> list[int]:
        return [number for batch in islice(loader(packing="step", **changes), 11) for number in seen(batch)]

    assert order() == order()
    assert sorted(order()) == sorted(order(seed=1))
    assert order() != order(seed=1)


def test_a_state_of_other_data_is_refused_and_max_steps_count_from_the_start() -> None:
    state = loader_after(2, max_steps=3).state_dict()
    data = loader(max_steps=3)
    data.load_state_dict(state)
    assert len(list(data)) == 1
    for other, text in [
        (loader(seed=1), "has seed=0, but this run has seed=1, which is another sequence of samples"),
        (loader(packing="none"), "has packing='rows', but this run has packing='none'"),
        (loader(PAIRS[1:]), "the saved data position has data='"),
        (loader(SINGLES), "the saved data position has data='"),
    ]:
        with pytest.raises(DataError, match=text):
            other.load_state_dict(state)
    with pytest.raises(DataError, match=r"lacks \['packing'\]"):
        loader().load_state_dict({name: value for name, value in state.items() if name != "packing"})


@settings(deadline=None, max_examples=25)
@given(ranks=st.integers(1, 5), rows=st.integers(1, 4), packing=st.sampled_from(["rows", "none"]))
def test_evaluation_gives_every_unit_once_and_every_rank_as_many_batches(ranks: int, rows: int, packing: Any) -> None:
    parts = [
        list(example_batches(PAIRS, seq_len=SEQ_LEN, rows=rows, rank=r, ranks=ranks, packing=packing))
        for r in range(ranks)
    ]
    assert len({len(part) for part in parts}) == 1
    assert all(len(batch["labels"]) == rows for part in parts for batch in part)
    assert sorted(number for part in parts for batch in part for number in seen(batch)) == list(range(UNITS))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"global_batch": 0}, "global_batch=0: a step needs at least 1 sample"),
        ({"rank": 2, "ranks": 2}, "rank=2 of ranks=2: there is no such data rank"),
        ({"packing": "tight"}, "packing='tight': no such way. Give rows, step, balanced or none"),
        ({"seq_len": 9}, "u:3: takes 11 tokens, but a row holds seq_len=9. Give a larger seq_len, or call `fit`"),
        ({"vocab_size": 20}, "u:9: id 20 at position 0 is outside the vocabulary of 20"),
        ({"units": []}, "there are no examples. Check the path"),
    ],
)
def test_what_makes_no_batch_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        loader(**changes)
    if "global_batch" not in changes:
        with pytest.raises(DataError, match=text):
            example_batches(**{"units": PAIRS, "seq_len": SEQ_LEN, "rows": 2, **changes})


def test_tokens_of_a_balanced_step_are_alike_on_all_ranks() -> None:
    draw = np.random.default_rng(0)
    units = [Example(ids=np.arange(size), learn=np.ones(size, bool)) for size in draw.integers(2, 65, 400).tolist()]
    sizes = {"seq_len": 64, "global_batch": 40, "seed": 0, "ranks": 4}
    for packing, spread in (("step", 1.05), ("balanced", 1.0)):
        loaders = [ExampleLoader(units, rank=rank, packing=packing, **sizes) for rank in range(4)]
        ratios = []
        for step in islice(zip(*loaders, strict=True), 9):
            assert sum(int(batch["ends"].sum()) for batch in step) == 40
            tokens = [int((batch["segment_ids"] > 0).sum()) for batch in step]
            assert packing == "step" or len({len(batch["labels"]) for batch in step}) == 1
            ratios.append(max(tokens) * 4 / sum(tokens))
        assert spread <= np.mean(ratios) and (packing == "step" or max(ratios) <= 1.05), ratios
